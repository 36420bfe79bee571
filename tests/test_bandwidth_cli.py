"""`bel-profile bandwidth` as a user meets it: a file, a table and an object, or a refusal that leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import faults
from bel.formats.console import run_command
from bel.formats.costs import costs_json, load_costs
from bel.profiler import bandwidth
from bel.profiler.bandwidth_cli import NAME, bandwidth_command
from bel.profiler.bandwidth_target import find_target
from bel.profiler.machine import file_system
from measured import BLOCK, SMALL, bundle_of
from measured import disk as disk

SCRATCH = ".bel-bandwidth.bel-tmp"


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str], disk: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """The command with short measurements, in an empty folder."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = run_command(bandwidth_command, NAME, [str(a) for a in arguments])
        return status, *capsys.readouterr()

    monkeypatch.chdir(disk)
    monkeypatch.setattr(bandwidth, "Effort", lambda: SMALL)
    return run


def test_a_bundle_gives_a_file_a_table_and_an_object(ran: Callable[..., tuple[int, str, str]], example: Path) -> None:
    bundle = bundle_of(example, Path("tiny.bel"))
    status, out, err = ran(bundle, "--threads", 1, "--json")
    assert status == 0, err
    costs = load_costs(Path("costs.json"))
    assert json.loads(out) == costs_json(costs) == json.loads(Path("costs.json").read_text())
    assert costs.cpu_expert_seconds is not None and costs.h2d_bytes_per_s is costs.layer_seconds is None
    assert costs.block_bytes == find_target(bundle, None).block_bytes
    assert "1 thread" in costs.machine
    status, out, err = ran(bundle, "--threads", 1)
    assert status == 0, err
    assert all(words in out for words in ("wrote costs.json", "disk, 1 at once", "memory copy", "on the CPU", "all from disk"))
    assert sorted(os.listdir()) == ["costs.json", "tiny.bel"]


def test_an_output_of_another_kind_needs_force(ran: Callable[..., tuple[int, str, str]]) -> None:
    Path("costs.json").write_text("my notes")
    status, _, err = ran(".", "--block", "128k")
    assert (status, "--force" in err, Path("costs.json").read_text()) == (2, True, "my notes")
    assert ran(".", "--block", "128k", "--force", "--threads", 1)[0] == 0
    assert load_costs(Path("costs.json")).block_bytes == BLOCK
    assert ran("costs.json", "--force")[0] == 2  # it is the input too


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["nowhere"], 3), ([".", "--block", "5000"], 2), ([".", "--block", "big"], 2), ([".", "-o", "no/costs.json"], 2), ([], 2)],
)
def test_what_cannot_be_done_is_said_and_nothing_is_left(
    ran: Callable[..., tuple[int, str, str]], arguments: list[str], expected: int
) -> None:
    status, out, err = ran(*arguments)
    assert (status, out, os.listdir()) == (expected, "", [])
    assert err and "Traceback" not in err


def test_memory_is_refused_as_a_disk(ran: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """On tmpfs, which takes O_DIRECT since Linux 6.6 and refuses it before."""
    shared = Path("/dev/shm")
    if not shared.is_dir() or file_system(shared) != "tmpfs" or not os.access(shared, os.W_OK):
        pytest.skip("there is no tmpfs to write to")
    folder = shared / f"bel-test-{os.getpid()}"
    folder.mkdir()
    try:
        status, out, err = ran(folder, "--block", "128k")
        assert (status, out, os.listdir(folder), os.listdir(tmp_path)) == (5, "", [], [])
        assert f"error: {folder}: " in err and ("page cache" in err)
    finally:
        folder.rmdir()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(disk: Path, number: signal.Signals) -> None:
    code = (
        "import sys; from bel.formats.console import run_command; from bel.profiler.bandwidth_cli import bandwidth_command;"
        "sys.exit(run_command(bandwidth_command, 'bel-profile', ['.', '--block', '128k']))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], cwd=disk, stderr=subprocess.PIPE, text=True)
    assert faults.wait_until((disk / SCRATCH / "random.bin").exists, child)
    child.send_signal(number)
    _, err = child.communicate(timeout=faults.HANG_SECONDS)
    assert (child.returncode, os.listdir(disk)) == (130, []), err
    assert "Traceback" not in err
