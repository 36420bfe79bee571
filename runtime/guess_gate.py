"""Whether guessing pays: guesses go on while at least half of what they read is used, and are tried again after a pause.

On text that the model was trained for two thirds are used; on random weights one in twenty, and the reads in vain cost more
than those in time bring.
"""

from __future__ import annotations

TRIAL_CALLS, PAUSE_CALLS = 192, 4096
"""Calls of single rows: guesses are judged after so many, and left out for so many."""
MIN_USED_SHARE = 0.5


class GuessGate:
    """Counts what came of guesses, and says whether the next one is to be made."""

    def __init__(self) -> None:
        self._calls = self._used = self._wasted = 0
        self._is_open = True

    def is_open(self) -> bool:
        """Asked once for each call of a single row."""
        self._calls += 1
        if self._is_open and self._calls > TRIAL_CALLS:
            read = self._used + self._wasted
            self._restart(is_open=not read or self._used >= MIN_USED_SHARE * read)
        elif not self._is_open and self._calls > PAUSE_CALLS:
            self._restart(is_open=True)
        return self._is_open

    def count(self, used: int, wasted: int) -> None:
        """What came of one guess: experts that the next call used, and those that it did not."""
        self._used += used
        self._wasted += wasted

    def _restart(self, *, is_open: bool) -> None:
        self._calls = self._used = self._wasted = 0
        self._is_open = is_open
