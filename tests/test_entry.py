"""Ctrl-C while a command still loads its modules."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

COMMANDS = {"bel-repack": "bel.repack.entry", "bel-profile": "bel.profiler.entry", "bel-run": "bel.runtime.entry"}
_INTERRUPTED_IMPORT = """
import signal, sys
{before}
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
from {module} import main
sys.argv = ["{name}", "--version"]
main()
"""


def interrupted(name: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """The command, interrupted when it begins to load click."""
    code = _INTERRUPTED_IMPORT.format(before=before, module=COMMANDS[name], name=name)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupted_start_is_one_line(name: str) -> None:
    done = interrupted(name, "signal.signal(signal.SIGINT, signal.default_int_handler)")
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", f"{name}: error: interrupted\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_an_ignored_signal_stays_ignored(name: str) -> None:
    done = interrupted(name, "signal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(name)


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_large_is_loaded_before_that(name: str) -> None:
    """What comes before the first line of `start` is not guarded."""
    code = f"import sys; import {COMMANDS[name]}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"click", "numpy", "cffi", "rich"} & set(done.stdout.split())


_STRUCK = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            {strike}
sys.meta_path.insert(0, Finder())
sys.argv = ["bel-run", "no-such-model", "-p", "x"]
from bel.runtime.entry import main
main()
"""
_TOLD = "bel-run: error: interrupted\n"


def struck(module: str, strike: str) -> subprocess.CompletedProcess[str]:
    """`bel-run`, in a process group of its own, with something done when it begins to load a module."""
    code = _STRUCK.format(module=module, strike=strike)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, process_group=0)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("bel.formats.entry", ""),  # it is the one that can say so
        ("bel.runtime.supervisor", _TOLD),
        ("bel.runtime.black_box", _TOLD),
        ("bel.runtime.cli", _TOLD),
        ("click", _TOLD),
    ],
)
def test_a_group_interrupted_early_ends_with_one_line_at_most(module: str, said: str) -> None:
    """As by a terminal: the signal is for the process that waits and for the one that works."""
    done = struck(module, "os.killpg(0, signal.SIGINT)")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", said)


def test_a_second_signal_within_the_first_is_no_second_line() -> None:
    again = (
        "write = os.write; os.write = lambda *a: (setattr(os, 'write', write), write(*a), signal.raise_signal(signal.SIGINT))"
    )
    done = struck("click", f"{again}; signal.raise_signal(signal.SIGINT)")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", _TOLD)


def test_an_interrupted_start_without_stderr() -> None:
    done = struck("click", "os.close(2); signal.raise_signal(signal.SIGINT)")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
