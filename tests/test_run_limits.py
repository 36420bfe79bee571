"""Limits of the machine that end a run are said to be the machine's, and not the model's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from recordings import EXAMPLE
from repack_runs import run_cli

COMMAND = str(Path(sys.executable).parent / "bel-run")
WAIT_SECONDS = 60.0
PLENTY_OF_FILES = 40


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("limits") / "tiny.bel"
    assert run_cli(EXAMPLE, "-o", folder).status == 0
    return folder


def limited(limit: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`bel-run` under a limit of the shell's."""
    script = ["bash", "-c", f'ulimit {limit}; exec "$0" "$@"', COMMAND, *arguments]
    return subprocess.run(script, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)


def test_no_number_of_open_files_makes_a_bad_model(bundle: Path) -> None:
    """Each place where one more cannot be opened, from that of the first module on to that of the experts."""
    statuses = []
    for count in range(6, PLENTY_OF_FILES, 2):
        done = limited(f"-n {count}", str(bundle), "-p", "x", "-n", "1", "--threads", "1", "--slots", "8")
        assert done.returncode in (0, 5), (count, done)
        assert "Traceback" not in done.stderr
        assert (done.returncode == 5) == ("bel-run: error: " in done.stderr), done.stderr
        statuses.append(done.returncode)
    assert statuses == sorted(statuses, reverse=True)
    assert statuses[-1] == 0


def test_time_that_is_used_up_is_told_from_memory_that_is() -> None:
    """`ulimit -t` sets both limits alike, and at the hard one the system kills as it does for memory."""
    endless = [str(EXAMPLE), "--stock", "--threads", "1", "-p", "x", "-n", "100000", "--ignore-eos", "--context", "100000"]
    done = limited("-t 2", *endless)
    assert done.returncode == 5
    assert "ulimit -t" in done.stderr.splitlines()[-1]
    assert "memory" not in done.stderr.splitlines()[-1]
