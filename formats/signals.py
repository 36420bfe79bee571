"""Holding Ctrl-C and termination back for the few steps that must not be torn apart."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def signals_held(*, then_raise: bool = True) -> Iterator[None]:
    """Run the block to its end; where a signal arrived meanwhile, raise KeyboardInterrupt behind it (or, on request, not)."""
    arrived: list[int] = []
    with _noted(arrived):
        yield
    if arrived and then_raise:
        raise KeyboardInterrupt


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Run the block to its end, and only then what would have been run for signals that arrived meanwhile.

    For calls into a C library that calls back: what a handler raises inside a callback is lost there.
    """
    arrived: list[int] = []
    try:
        with _noted(arrived):
            yield
    finally:
        for number in arrived:
            signal.raise_signal(number)


@contextlib.contextmanager
def _noted(arrived: list[int]) -> Iterator[None]:
    """Do no more for a signal than to add it to `arrived` while the block runs.

    Python runs its handlers in the main thread, whichever thread the signal reached; in any other thread nothing is noted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, _frame: FrameType | None) -> None:
        arrived.append(number)

    before = {n: signal.getsignal(n) for n in STOPPING}
    noted = [n for n, handler in before.items() if callable(handler)]  # SIG_IGN and SIG_DFL stay what they are
    for number in noted:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number in noted:
            signal.signal(number, before[number])
