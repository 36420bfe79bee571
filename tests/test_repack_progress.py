"""What bel-repack tells of its progress: to its caller, in plain lines, and as a bar on a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
from pathlib import Path

import pytest

import synth
from bel.formats.console import Progress
from bel.formats.gguf_model import open_model
from bel.repack.convert import convert
from bel.repack.layout import plan_layout
from faults import run_cli
from repack_answers import model as model
from repack_runs import source as source


def test_progress_says_where_it_is(tmp_path: Path, source: Path) -> None:
    """Each phase counts up to its total and never beyond; a run that is watched is the same as one that is not."""
    model, seen = open_model(source), []
    layout = plan_layout(model, "model", ple="auto", shard_bytes=2**40)
    convert(model, layout, tmp_path / "out.bel", force=False, check=True, progress=lambda *row: seen.append(row))
    assert {phase for phase, _, _ in seen} == {"repack", "verify"}
    assert all(0 < done <= total for _, done, total in seen)
    assert [done == total for phase, done, total in seen if phase == "repack"][-1]
    assert [done == total for phase, done, total in seen if phase == "verify"][-1]
    Progress("x").close()


class Clock:
    """A clock that goes on by a step at each look."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_plain_progress_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("bel-repack", Clock(2.0))
    for done in range(10, 101, 10):
        progress("repack", done * 2**20, 100 * 2**20)
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" % ")[0] for line in lines] == [
        "bel-repack: repack 40",
        "bel-repack: repack 70",
        "bel-repack: repack 100",
    ]
    assert all(re.search(r"of 100 MiB, \d+ MB/s, \d+ s left$", line) for line in lines)


def test_a_quick_run_says_nothing_on_stderr(model: Path) -> None:
    assert run_cli(model).stderr == ""


def test_progress_of_nothing_does_not_divide_by_zero(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("x", Clock(10.0))
    for _ in range(3):
        progress("repack", 0, 0)
    assert "nan" not in capsys.readouterr().err


def on_a_terminal(script: str, *args: str | Path, columns: int = 100, rows: int = 24) -> str:
    """What a Python script writes to a terminal."""
    import fcntl
    import struct
    import sys
    import termios

    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", script, *map(str, args)], stdin=side, stdout=side, stderr=side)
    os.close(side)
    shown = b""
    while select.select([main], [], [], 30)[0]:
        try:
            part = os.read(main, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        shown += part
    os.close(main)
    assert process.wait(timeout=30) == 0, shown
    return shown.decode()


SLOW = """
import sys, time
import bel.formats.console as console
class Clock:
    now = 0.0
    def __call__(self):
        Clock.now += 1.0
        return Clock.now
console.Progress.__init__.__defaults__ = (Clock(),)
from bel.repack.cli import main
main()
"""


@pytest.mark.parametrize(("columns", "rows"), [(100, 24), (0, 0)], ids=["a size", "a terminal that does not know its size"])
def test_a_bar_on_a_terminal(tmp_path: Path, columns: int, rows: int) -> None:
    experts = 96
    tensors = synth.expert_stacks(0, experts, width=512, ff=512)
    path = synth.Gguf(synth.moe_entries(layers=1, experts=experts), tensors).write(tmp_path / "m.gguf")
    assert path.stat().st_size > 3 * 4 * 2**20, "several chunks, so that there is something to show"
    shown = on_a_terminal(SLOW, path, columns=columns, rows=rows)
    bars = [part for part in re.split(r"[\r\n]", shown) if re.search(r"\d+%\|", part)]
    assert bars, shown
    for phase in ("repack", "verify"):
        mine = [b for b in bars if b.startswith(phase)]
        assert mine, (phase, bars)
        assert re.search(r"\d+(\.\d+)?[kMG]?/\d+(\.\d+)?[kMG] \[.*<.*, .*B/s\]", mine[-1]), mine
    last = shown.rstrip().splitlines()[-1]
    assert "bel-repack restore" in last, "the table stands below, and the bar is gone"


def test_no_bar_for_a_quick_run_on_a_terminal(model: Path) -> None:
    shown = on_a_terminal("from bel.repack.cli import main; main()", model)
    assert "%|" not in shown


def test_a_long_path_is_not_cut_on_a_narrow_terminal(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    path = synth.moe().write(folder / "m.gguf")
    shown = on_a_terminal("from bel.repack.cli import main; main()", path, columns=40)
    assert str(folder / "m.bel") in shown.replace("\r\n", "\n")
