"""Guesses stop where they do not pay, go on where they do, and are tried again."""

from __future__ import annotations

import pytest

from bel.runtime.cache_rows import Ints
from bel.runtime.guess_gate import PAUSE_CALLS, TRIAL_CALLS, count, is_open, make_gate


def play(gate: Ints, calls: int, used: int, wasted: int, most_in_vain: int = 1) -> int:
    """How many of so many calls made a guess, each of which came out like this."""
    made = 0
    for _ in range(calls):
        if is_open(gate, most_in_vain):
            made += 1
            count(gate, used, wasted)
    return made


@pytest.mark.parametrize(("used", "wasted"), [(2, 0), (1, 1), (0, 0)])
def test_guesses_that_pay_or_read_nothing_go_on(used: int, wasted: int) -> None:
    assert play(make_gate(), 5 * PAUSE_CALLS, used, wasted) == 5 * PAUSE_CALLS


def test_guesses_in_vain_stop_and_are_tried_again() -> None:
    gate = make_gate()
    assert play(gate, PAUSE_CALLS, 1, 2) == TRIAL_CALLS
    assert TRIAL_CALLS <= play(gate, PAUSE_CALLS + 2 * TRIAL_CALLS, 1, 2) <= TRIAL_CALLS + 1


def test_work_that_changes_is_noticed_both_ways() -> None:
    gate = make_gate()
    assert play(gate, 3 * TRIAL_CALLS, 2, 1) == 3 * TRIAL_CALLS
    assert play(gate, 3 * TRIAL_CALLS, 0, 2) <= 2 * TRIAL_CALLS + 1
    assert play(gate, PAUSE_CALLS // 2, 2, 0) == 0
    assert play(gate, PAUSE_CALLS, 2, 0) > 0
    assert play(gate, PAUSE_CALLS, 2, 0) == PAUSE_CALLS


def test_more_may_be_in_vain_where_that_costs_less() -> None:
    assert play(make_gate(), PAUSE_CALLS, 1, 3, 3) == PAUSE_CALLS
    assert play(make_gate(), PAUSE_CALLS, 1, 4, 3) == TRIAL_CALLS
