"""Whether guessing pays: guesses go on while enough of what they read is used, and are tried again after a pause.

On text that the model was trained for two thirds are used where half of the experts have slots, and half of them where three
quarters have; on random weights one in twenty, and the reads in vain cost more than those in time bring.
"""

from __future__ import annotations

import numpy as np

from bel.runtime.cache_rows import Ints
from bel.runtime.compiled import compiled_if_possible

TRIAL_CALLS, PAUSE_CALLS = 192, 4096
"""Calls of single rows: guesses are judged after so many, and left out for so many."""

CALLS, USED, WASTED, IS_CLOSED = range(4)
"""Of a gate, i64: calls since it was opened or closed; of what was brought by guesses, used and not; whether it is closed."""


def make_gate() -> Ints:
    """A gate that is open."""
    return np.zeros(4, np.int64)


@compiled_if_possible
def is_open(gate: Ints, most_in_vain: int) -> bool:
    """Asked once for each call of a single row: whether a guess is to be made.  For each read that is used, at most so many
    may be in vain."""
    gate[CALLS] += 1
    if gate[IS_CLOSED] == 0 and gate[CALLS] > TRIAL_CALLS:
        wasted = gate[WASTED] > most_in_vain * gate[USED]
        gate[:] = 0
        gate[IS_CLOSED] = wasted
    elif gate[IS_CLOSED] != 0 and gate[CALLS] > PAUSE_CALLS:
        gate[:] = 0
    return bool(gate[IS_CLOSED] == 0)


@compiled_if_possible
def count(gate: Ints, used: int, wasted: int) -> None:
    """What came of one guess: experts that the next call used, and those that it did not."""
    gate[USED] += used
    gate[WASTED] += wasted
