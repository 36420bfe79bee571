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
