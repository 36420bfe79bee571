"""Faults that a sceptical user found in bel-profile with the README alone: each as a test of its kind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bel.formats.console import run_command
from bel.formats.errors import MachineError
from bel.formats.trace import DECODE, TraceWriter
from bel.formats.trace_header import TraceHeader, TraceLayer
from bel.profiler.cli import NAME, main_group

HEADER = TraceHeader("m", "qwen3moe", "f", (TraceLayer(0, 4, 2, 100),), "code")


def run(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str, str]:
    """Status, stdout and stderr of a command."""
    capsys.readouterr()
    status = run_command(main_group, NAME, [str(a) for a in args])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return status, said.out, said.err


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "code.trace"
    with TraceWriter(path, HEADER) as writer:
        for n in range(8):
            ids = np.array([[n % 4, (n + 1) % 4]], np.uint16)
            writer.append(phase=DECODE, ubatch=n, layer=0, tokens=np.array([n]), ids=ids)
    return path


def test_a_trace_that_is_being_written_is_not_replaced(tmp_path: Path) -> None:
    """The first of two recordings to one name must not report the second one's work as its own."""
    path = tmp_path / "x.trace"
    with TraceWriter(path, HEADER) as writer:
        with pytest.raises(MachineError, match="another recording"):
            TraceWriter(path, HEADER, replace=True)
        writer.append(phase=DECODE, ubatch=0, layer=0, tokens=np.array([0]), ids=np.array([[0, 1]], np.uint16))
    TraceWriter(path, HEADER, replace=True).close()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("jsonl", '{"token":0,"layer":99999999999,"experts":[3,1],"phase":"decode"}\n'),
        ("jsonl", '{"token":0,"layer":65536,"experts":[3,1],"phase":"decode"}\n'),
        ("thecodacus-csv", "pos,layer,id0,id1\n0,4294967296,1,2\n"),
    ],
)
def test_a_layer_that_cannot_be_is_refused_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, text: str
) -> None:
    path = tmp_path / "x.txt"
    path.write_text(text)
    status, _, err = run(capsys, "import", path, "--from", kind, "-o", tmp_path / "x.trace")
    assert status == 3
    assert str(path) in err
    assert "line " in err
    assert not (tmp_path / "x.trace").exists()


@pytest.mark.parametrize(
    "args",
    [
        ("summarize", "gone.trace", "-o", "z.json"),
        ("simulate", "gone.trace"),
        ("report", "gone.trace"),
        ("import", "gone", "--from", "jsonl", "-o", "z.trace"),
        ("--merge", "gone.json", "gone2.json"),
    ],
)
def test_a_missing_input_is_bad_input_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *args)
    assert (status, out) == (3, "")
    assert "gone" in err
    assert "no such file" in err


@pytest.mark.parametrize("command", ["summarize", "simulate", "report"])
def test_a_trace_named_twice_does_not_count_twice(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "link.trace").symlink_to(trace)
    output = ["-o", tmp_path / "z.json"] if command == "summarize" else []
    for second in (trace, tmp_path / "link.trace"):
        status, _, err = run(capsys, command, trace, second, *output)
        assert status == 2
        assert "twice" in err


def test_a_profile_is_not_reported_as_served_one_by_one(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "code.json"
    assert run(capsys, "summarize", trace, "-o", profile)[0] == 0
    status, _, err = run(capsys, "report", profile, "--one-by-one")
    assert status == 2
    assert "profile" in err


def test_a_report_into_a_closed_pipe(trace: Path) -> None:
    script = f"'{Path(sys.executable).with_name(NAME)}' report '{trace}' | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 5)
