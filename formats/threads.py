"""Threads that libraries start unasked.  A limit on processes (ulimit -u, or a container's) may leave this process none."""

from __future__ import annotations

import os
import threading
import time

from bel.formats.errors import MachineError

_END_SECONDS = 0.5


def no_blas_threads() -> None:
    """Have numpy's OpenBLAS start no threads, unless the environment already says how many.  To be called before its import.

    Nothing here multiplies matrices with it.  It starts one thread a core when it is loaded, and where it gets none it sends
    this process SIGINT, which looks like Ctrl-C.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def check_startable(count: int, *, hint: str) -> None:
    """Raise MachineError where this process may not start `count` more threads at once: a library that is refused one ends the
    process, with a line of its own or none."""
    before, end = _running(), threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=end.wait)
            thread.start()
            started.append(thread)
    except RuntimeError:
        found = f"{len(started)} of {count}"
        raise MachineError("the machine refuses more threads", found=found, hint=hint) from None
    finally:
        end.set()
        for thread in started:
            thread.join()
        until = time.monotonic() + _END_SECONDS
        while _running() > before and time.monotonic() < until:  # they count until the system has let them go
            time.sleep(_END_SECONDS / 1000)


def _running() -> int:
    """Threads of this process (proc(5), task)."""
    return len(os.listdir("/proc/self/task"))
