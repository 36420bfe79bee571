"""The first moments of a command: its modules take a tenth of a second to load, and Ctrl-C may come before they have."""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130  # `InterruptedRun.exit_code`, whose module is not loaded here


def guard(name: str) -> None:
    """From here on Ctrl-C ends this process with a line, until `run_command` sees to signals.  One that is ignored, as in a job
    behind nohup, stays so.
    """
    is_told = False

    def stop(*_: object) -> None:
        nonlocal is_told
        if is_told:
            return  # a second signal, in the middle of the first: that one ends it
        is_told = True
        try:
            os.write(2, f"{name}: error: interrupted\n".encode())
        finally:  # stderr may be closed
            os._exit(INTERRUPTED)  # nothing has begun that would have to end

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, stop)


def start(name: str, module: str) -> None:
    """Load a command's module and run its `main`, under `guard`."""
    guard(name)
    import importlib

    importlib.import_module(module).main()
