"""Standard streams of bel-repack that are closed, full or have no reader."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import synth
from faults import COMMAND, run_cli
from repack_answers import repacked


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return synth.moe().write(tmp_path / "m.gguf")


@pytest.fixture
def bundle(model: Path) -> Path:
    return repacked(model)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_reader_that_has_gone_is_no_traceback(model: Path, bundle: Path, flags: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for args in (["inspect", str(model)], ["verify", str(bundle)], ["--help"]):
        done = subprocess.run(
            [COMMAND, *args, *(flags if "--help" not in args else [])],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert done.returncode == 141
        assert done.stderr == ""
    os.close(writer)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_full_disk_behind_stdout(model: Path, flags: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([COMMAND, "inspect", model, *flags], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 5
    assert "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr


def test_a_full_disk_behind_stdout_is_told_from_one_behind_the_output(model: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([COMMAND, "inspect", model], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert "standard output" in done.stderr or "stdout" in done.stderr


def test_a_full_disk_behind_stderr(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([COMMAND, tmp_path / "gone.gguf"], stdout=subprocess.PIPE, stderr=full, text=True, check=False)
    assert done.returncode == 3
    assert done.stdout == ""


CLOSED = {"stdout": ">&-", "stderr": "2>&-", "stdin": "<&-", "both": ">&- 2>&-", "all": "<&- >&- 2>&-"}


@pytest.mark.parametrize("which", CLOSED)
def test_closed_standard_streams(model: Path, tmp_path: Path, which: str) -> None:
    """As a daemon may start a command: no file of the bundle takes a stream's place and its text, and the work is done; the
    status tells of an answer that could not be written."""
    script = f"'{COMMAND}' '{model}' {CLOSED[which]}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == (0 if which in ("stderr", "stdin") else 5), done
    assert which != "stdout" or "standard output: Bad file descriptor" in done.stderr
    assert run_cli("verify", tmp_path / "m.bel", "--source", model).status == 0
