"""Stopping signals at the worst moments: where Python drops what a handler raises, and twice in a row."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

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

    def too_late(path: Path, data: bytes) -> None:
        path.write_bytes(data)
        signal.raise_signal(signal.SIGINT)

    capsys.readouterr()
    monkeypatch.setattr("bel.profiler.record_cli.replace_file", too_late)
    assert run_command(main_group, "bel-profile", [*command, "--force"]) == 130
    assert f"{trace} and {output} are written" in capsys.readouterr().err


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
