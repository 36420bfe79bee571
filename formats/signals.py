"""Ctrl-C and termination: as KeyboardInterrupt, once and not lost; and held back for steps that must not be torn apart."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

Held = tuple[int, float]  # a signal and when it arrived, by time.monotonic
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEAT_SECONDS = 1.0
"""Ctrl-C in a terminal may reach a process twice, from the terminal and passed on by its parent, and `kill` is often sent in
twos.  A repeat must not break the cleaning up that the first one began."""
_AGAIN_SECONDS = 0.01


class Interrupts:
    """Makes KeyboardInterrupt of stopping signals: of the first one, and of others that come REPEAT_SECONDS later.

    Python drops an exception that leaves a destructor, a callback of weakref or gc, or one that a C library calls, and the
    signal with it.  Such a loss is seen, and the signal handled again by whatever handles it then, until it is not lost.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self._number = int(signal.SIGINT)
        self._is_caught = self._is_late = self.is_done = False
        self._other_hook = sys.__unraisablehook__

    @property
    def was_raised(self) -> bool:
        """Whether a signal counted in this command."""
        return self._last is not None and (self._is_late or not self.is_done)

    def done(self) -> None:
        """What the command was asked for is in its place: from now on no signal stops it from saying so.

        To be called while signals are held, so that one which came with the last step does not count either.  A second one,
        REPEAT_SECONDS later, counts again: where the answer's reader hangs nothing else would end the command.
        """
        self.is_done = self._is_caught

    def counts(self, number: int, arrived: float | None = None) -> bool:
        """Whether a signal that arrived at this time (None: now) is no repeat of one that counted; if so, it counted."""
        arrived = time.monotonic() if arrived is None else arrived
        if self._last is not None and arrived < self._last + REPEAT_SECONDS:
            return False
        self._number, self._last = number, time.monotonic()
        if self.is_done and not self._is_late:
            self._is_late = True
            return False
        return True

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Signal handler."""
        if self.counts(number):
            raise KeyboardInterrupt

    def raise_held(self, held: Sequence[Held]) -> None:
        """Raise KeyboardInterrupt for signals that were held back, as if they had been handled when they arrived."""
        if self.is_done:
            return
        for number, arrived in held:
            # Under another handler nobody keeps count of repeats.
            if signal.getsignal(number) != self.handle or self.counts(number, arrived):
                raise KeyboardInterrupt

    @contextlib.contextmanager
    def caught(self, *, is_last: bool) -> Iterator[None]:
        """Handle stopping signals while the block runs; one that is ignored, as behind nohup, stays so.

        Takes SIGALRM and its timer.  `is_last`: nothing is done in this process behind the block, so no signal can stop it.
        """
        self._last, self._other_hook = None, sys.unraisablehook
        self._is_caught, self._is_late, self.is_done = True, False, False
        before = {n: signal.getsignal(n) for n in (*STOPPING, signal.SIGALRM)}
        taken = [n for n in STOPPING if before[n] is not signal.SIG_IGN]
        sys.unraisablehook = self._lost
        signal.signal(signal.SIGALRM, self._at_alarm)
        for number in taken:
            signal.signal(number, self.handle)
        try:
            yield
        finally:
            self._is_caught = self.is_done = False
            self._last = math.inf  # nothing counts any more: what would be raised here nobody catches
            for number in taken:
                signal.signal(number, signal.SIG_IGN if is_last else before[number])
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before[signal.SIGALRM])
            sys.unraisablehook = self._other_hook

    def _lost(self, what: UnraisableHookArgs) -> None:
        if not issubclass(what.exc_type, KeyboardInterrupt):
            self._other_hook(what)
            return
        self._last = None
        # Not at once: here, in the callback still, it would be lost again.  A trace function is called at the next bytecode of
        # what the callback interrupted; and where that waits in a system call, the timer ends it.
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS, _AGAIN_SECONDS)
        interrupted = sys._getframe().f_back
        if interrupted is not None:
            interrupted.f_trace, interrupted.f_trace_opcodes = self._at_bytecode, True
            sys.settrace(lambda *_: None)

    def _at_bytecode(self, frame: FrameType, _event: str, _argument: object) -> None:
        frame.f_trace, frame.f_trace_opcodes = None, False
        self._handle_again()

    def _at_alarm(self, _number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is Interrupts._lost.__code__:
                return  # the timer comes again
            frame = frame.f_back
        self._handle_again()

    def _handle_again(self) -> None:
        sys.settrace(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        handler = signal.getsignal(self._number)
        if callable(handler):
            handler(self._number, None)


INTERRUPTS = Interrupts()
"""Those of this process."""


@contextlib.contextmanager
def signals_held(*, then_raise: bool = True) -> Iterator[None]:
    """Run the block to its end; where a signal arrived meanwhile, raise KeyboardInterrupt behind it (or, on request, not).

    A repeat of a signal that was raised already raises nothing.
    """
    arrived: list[Held] = []
    with _noted(arrived):
        yield
    if then_raise:
        INTERRUPTS.raise_held(arrived)


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Run the block to its end, and only then what would have been run for signals that arrived meanwhile.

    For calls into a C library that calls back: what a handler raises inside a callback is lost there.
    """
    arrived: list[Held] = []
    try:
        with _noted(arrived):
            yield
    finally:
        for number, _ in arrived:
            signal.raise_signal(number)


@contextlib.contextmanager
def _noted(arrived: list[Held]) -> Iterator[None]:
    """Do no more for a signal than to add it and its time to `arrived` while the block runs.

    Python runs its handlers in the main thread, whichever thread the signal reached; in any other thread nothing is noted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, _frame: FrameType | None) -> None:
        arrived.append((number, time.monotonic()))

    before = {n: signal.getsignal(n) for n in STOPPING}
    noted = [n for n, handler in before.items() if callable(handler)]  # SIG_IGN and SIG_DFL stay what they are
    for number in noted:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number in noted:
            signal.signal(number, before[number])
