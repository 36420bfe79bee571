"""Ctrl-C while a model runs: the first one asks for an orderly stop behind the token at hand, the second ends it at once."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from bel.formats.signals import INTERRUPTS, STOPPING


class StopRequest:
    """Whether a stop was asked for."""

    def __init__(self) -> None:
        self.is_made = False

    def __call__(self) -> bool:
        return self.is_made

    def note(self, number: int, _frame: FrameType | None) -> None:
        """Signal handler.  Raises KeyboardInterrupt from the second signal on; a repeat of the first, which reaches a process
        both from a terminal and from its parent, is none, not even behind the end of the block."""
        if not INTERRUPTS.counts(number):
            return
        if self.is_made:
            raise KeyboardInterrupt
        self.is_made = True


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Take SIGINT, SIGTERM and SIGHUP as requests while the block runs.  Only in the main thread; ignored ones stay ignored."""
    request = StopRequest()
    before = {n: signal.getsignal(n) for n in STOPPING}
    taken = [n for n, handler in before.items() if handler is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, request.note)
    try:
        yield request
    finally:
        for number in taken:
            signal.signal(number, before[number])
