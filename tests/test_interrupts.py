"""Stopping signals at the worst moments: where Python drops what a handler raises, and twice in a row."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bel.formats.signals import REPEAT_SECONDS
from bel.formats.staging import replace_file

_COMMAND = """
import ctypes, functools, gc, operator, os, signal, sys, time, weakref
import click
from bel.formats.console import run_command
from bel.formats.signals import signals_held

def strike(*_):
    os.kill(os.getpid(), signal.{number})
    sum(range(1000))  # bytecodes, between which Python handles it
    return 0

class Thing:
    pass

class Struck:
    def __del__(self):
        strike()

@click.command()
def main():
    try:
{body}
        for _ in range(200):
            time.sleep(0.01)
        click.echo("was not stopped")
    finally:
{behind}
        click.echo("cleaned up")

status = run_command(main, "bel-x")
sys.stdout.flush()
os._exit(status)
"""
LOSSES = {
    "weakref": "thing = Thing(); ref = weakref.ref(thing, strike); del thing",
    "weakrefs": "for i in range(50):\n            thing = Thing(); ref = weakref.ref(thing, strike); del thing",
    "destructor": "struck = Struck(); del struck",
    "gc": "gc.callbacks.append(strike); gc.collect(); gc.callbacks.clear()",
    "ctypes": "ctypes.CFUNCTYPE(ctypes.c_int)(strike)()",
    "cffi": "import cffi; ffi = cffi.FFI(); ffi.callback('int(void)', strike)()",
    "before a wait": "struck = [Struck()]; list(map(operator.call, [struck.clear, functools.partial(time.sleep, 100)]))",
    "held": "with signals_held():\n            thing = Thing(); ref = weakref.ref(thing, strike); del thing",
}


def outcome(body: str, number: str = "SIGTERM", behind: str = "pass") -> subprocess.CompletedProcess[str]:
    """A command with this body, which strikes itself with the signal."""
    code = _COMMAND.format(number=number, body=f"        {body}", behind=f"        {behind}")
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("where", LOSSES)
def test_a_signal_is_not_lost(where: str) -> None:
    done = outcome(LOSSES[where])
    assert (done.returncode, done.stdout) == (130, "cleaned up\n"), done
    if where != "cffi":  # which tells what it drops
        assert done.stderr == "bel-x: error: interrupted\n"


def test_a_signal_lost_again_and_again_gets_through() -> None:
    """Nearly all the time is spent where it is lost; a program without it would go on for ever."""
    callback = "ctypes.CFUNCTYPE(ctypes.c_int)(lambda: [time.sleep(0.0005) for _ in range(20)] and 0)"
    done = outcome(f"strike_once = weakref.ref(Thing(), strike); f = {callback}\n        while True: f()")
    assert (done.returncode, done.stdout, done.stderr) == (130, "cleaned up\n", "bel-x: error: interrupted\n")


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_repeat_does_not_break_the_cleaning_up(number: str) -> None:
    """A terminal's Ctrl-C may come twice: from the terminal, and passed on by a parent."""
    done = outcome("strike()", number, "for _ in range(3): strike()")
    assert (done.returncode, done.stdout, done.stderr) == (130, "cleaned up\n", "bel-x: error: interrupted\n")


def test_a_repeat_in_held_steps_does_not_break_the_cleaning_up() -> None:
    done = outcome("strike()", behind="with signals_held(): strike()")
    assert (done.returncode, done.stdout) == (130, "cleaned up\n"), done


def test_the_first_signal_of_held_steps_counts() -> None:
    done = outcome("with signals_held(): strike()", behind="strike()")
    assert (done.returncode, done.stdout) == (130, "cleaned up\n"), done


def test_a_later_signal_counts_again() -> None:
    """Whoever sees nothing happen presses Ctrl-C once more."""
    done = outcome("strike()", behind="time.sleep(1.1); strike()")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "bel-x: error: interrupted\n")


@pytest.mark.parametrize("other", ["SyntaxError('x')", "ImportError('x')", "RuntimeError('x')"])
def test_a_signal_that_something_makes_another_error_of_is_told(other: str) -> None:
    """As C code does whose import of a module was cut short: Python said that it could not load unicodedata."""
    body = f"try:\n            strike()\n        except KeyboardInterrupt:\n            raise {other}"
    done = outcome(body)
    assert (done.returncode, done.stdout, done.stderr) == (130, "cleaned up\n", "bel-x: error: interrupted\n")
    assert outcome(f"raise {other}").returncode == 1, "without a signal it is a bug"


def test_other_losses_are_still_told() -> None:
    done = outcome("ref = weakref.ref(Thing(), lambda _: 1 / 0)")
    assert done.returncode == 0
    assert "ZeroDivisionError" in done.stderr


def test_a_signal_behind_the_last_line_changes_nothing(tmp_path: Path) -> None:
    """All is done and told; a status of a signal would say otherwise."""
    code = """
import os, signal, sys
import click
from bel.formats.console import run_command
status = run_command(click.Command("x", callback=lambda: None), "bel-x")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.raise_signal(number)
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_within_a_process_gives_its_handlers_back() -> None:
    import click

    from bel.formats.console import run_command

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    before = [signal.getsignal(n) for n in numbers], sys.unraisablehook
    assert run_command(click.Command("x", callback=lambda: None), "bel-x", []) == 0
    assert ([signal.getsignal(n) for n in numbers], sys.unraisablehook) == before


def test_a_recording_interrupted_late_names_what_is_there(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its trace is complete; the same command would be refused for it."""
    from bel.formats.console import run_command
    from bel.profiler.cli import main_group

    output, trace = tmp_path / "a.json", tmp_path / "a.trace"
    command = ["record", str(example), "-p", "a", "-n", "2", "--threads", "1", "-o", str(output)]
    with monkeypatch.context() as patch:
        patch.setattr("bel.profiler.summarize.summarize", lambda _: signal.raise_signal(signal.SIGINT))
        assert run_command(main_group, "bel-profile", command) == 130
    said = capsys.readouterr().err
    assert f"interrupted; what was recorded until then is in {trace}." in said
    assert not output.exists()
    hint = f"bel-profile summarize {trace} -o {output}"
    assert hint in said
    assert run_command(main_group, "bel-profile", hint.split()[1:]) == 0
    assert output.exists()

    def struck(path: Path, data: bytes) -> None:
        replace_file(path, data)
        signal.raise_signal(signal.SIGINT)

    capsys.readouterr()
    monkeypatch.setattr("bel.profiler.record_cli.replace_file", struck)
    assert run_command(main_group, "bel-profile", [*command, "--force"]) == 0
    said = capsys.readouterr()
    assert f"wrote {trace} and {output}" in said.out
    assert "interrupted" not in said.err


def test_a_recording_interrupted_early_leaves_nothing(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bel.formats.console import run_command
    from bel.profiler.cli import main_group

    monkeypatch.setattr("bel.profiler.record.record", lambda *_: signal.raise_signal(signal.SIGINT))
    command = ["record", str(example), "-p", "a", "-n", "2", "-o", str(tmp_path / "a.json")]
    assert run_command(main_group, "bel-profile", command) == 130
    assert capsys.readouterr().err == "bel-profile: error: interrupted; nothing was recorded\n"
    assert list(tmp_path.iterdir()) == []


_STRUCK_STEP = """
import os, signal
import bel.formats.staging as staging, bel.repack.cli as cli
real = {step}
def struck(*arguments, **named):
    if {is_before}:
        strike()
    result = real(*arguments, **named)
    strike()
    return result
def strike():
    os.kill(os.getpid(), signal.SIGTERM)
    sum(range(1000))  # bytecodes, between which Python handles it
{step} = struck
cli.main()
"""
CONVERT, RESTORE = ("m.gguf", "-o", "m.bel"), ("restore", "old.bel", "-o", "out")


def struck_at(step: str, folder: Path, *arguments: str, is_before: bool = False) -> subprocess.CompletedProcess[str]:
    """`bel-repack`, struck behind each call of a step, or on both sides of it."""
    code = _STRUCK_STEP.format(step=step, is_before=is_before)
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def place(example: Path, tmp_path: Path) -> Path:
    """A folder with a model, m.gguf, its bundle, old.bel, and what a forced run replaces: m.bel and a file in out."""
    from bel.formats.console import run_command
    from bel.repack.cli import main_group

    shutil.copy(example, tmp_path / "m.gguf")
    for name in ("old.bel", "m.bel"):
        assert run_command(main_group, "bel-repack", [str(tmp_path / "m.gguf"), "-o", str(tmp_path / name)]) == 0
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "m.gguf").write_bytes(b"old")
    return tmp_path


@pytest.mark.parametrize("command", [CONVERT, RESTORE], ids=["convert", "restore"])
@pytest.mark.parametrize("step", ["staging.exchange", "staging.StagingFolder._remove", "staging._remove", "cli.print_table"])
def test_a_signal_behind_the_last_name_changes_nothing(step: str, command: tuple[str, ...], place: Path) -> None:
    """With the exchange of the names, around the removal of what was replaced, and around the answer."""
    new = place / command[-1] / ("m.gguf" if command is RESTORE else "")
    before, names = new.stat().st_ino, sorted(place.rglob("*"))
    done = struck_at(step, place, *command, "--force", is_before=step != "staging.exchange")
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.startswith("repacked" if command is CONVERT else "restored into")
    assert new.stat().st_ino != before
    assert sorted(place.rglob("*")) == names


@pytest.mark.parametrize("command", [CONVERT, RESTORE], ids=["convert", "restore"])
def test_a_signal_with_a_first_name_changes_nothing(command: tuple[str, ...], place: Path) -> None:
    shutil.rmtree(place / command[-1])
    done = struck_at("os.rename", place, *command, "--json")
    assert (done.returncode, done.stderr) == (0, ""), done
    assert json.loads(done.stdout)
    assert (place / command[-1]).is_dir()


@pytest.mark.parametrize(
    ("step", "command"), [("staging.StagingFolder.publish", CONVERT), ("staging.StagingFolder._make", RESTORE)]
)
def test_a_signal_before_the_last_name_leaves_nothing(step: str, command: tuple[str, ...], place: Path) -> None:
    inodes = {path: path.stat().st_ino for path in place.rglob("*")}
    done = struck_at(step, place, *command, "--force", is_before=True)
    assert (done.returncode, done.stdout) == (130, ""), done
    assert done.stderr == "bel-repack: error: interrupted; nothing was left behind\n"
    assert {path: path.stat().st_ino for path in place.rglob("*")} == inodes


def test_a_fetch_is_done_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    code = """
import os, signal, sys
from pathlib import Path
import click
from bel.formats.console import run_command
from bel.repack import fetch
real = os.rename
def struck(*names):
    real(*names)
    signal.raise_signal(signal.SIGINT)
os.rename = struck
def work():
    fetch._settle(Path("work"), Path("new.bel"), set())
    signal.raise_signal(signal.SIGINT)
    click.echo("fetched")
sys.exit(run_command(click.Command("x", callback=work), "bel-x"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fetched\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["new.bel"]


def test_an_answer_that_hangs_can_be_interrupted() -> None:
    """Nobody reads it: the second Ctrl-C ends the command, and says that the work is done."""
    body = f"strike(); time.sleep({REPEAT_SECONDS + 0.1}); strike()"
    done = outcome(f"from bel.formats.signals import INTERRUPTS; INTERRUPTS.done(); {body}")
    assert (done.returncode, done.stdout) == (130, "cleaned up\n"), done
    assert done.stderr == "bel-x: error: interrupted; the output is complete\n"


def test_what_is_done_in_no_command_stops_nothing_later() -> None:
    """A program that uses the library has its own handlers, and goes on."""
    from bel.formats.signals import Interrupts

    interrupts = Interrupts()
    interrupts.done()
    assert interrupts.counts(signal.SIGINT)
