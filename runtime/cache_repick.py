"""A fixed set that is chosen again every N tokens by the uses since, with hysteresis so that the set does not flutter."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bel.runtime.cache_rows import (
    CAPACITY,
    CONFIG,
    COUNT,
    N_ITEMS,
    NOWHERE,
    PERIOD,
    PICKED,
    RESIDENT,
    SIZE,
    STAMP,
    TOKENS,
    UPLOADS,
    USED,
    VICTIMS,
    Floats,
    Ints,
)
from bel.runtime.compiled import compiled_if_possible

HYSTERESIS = 1.25
"""A newcomer must have been used this many times as often as the member that it replaces."""
KEPT_SHARE = 0.5  # of each count from one choice to the next


@compiled_if_possible
def repick(ints: Ints, reals: Floats) -> tuple[int, int]:
    """Swap members for better ones when a period is over.  The numbers of uploads and of victims.

    Newcomers come in the order of their uses, the most used first, each for the least used member that leaves it room; of
    equals the one used last is worth more.
    """
    if ints[CONFIG, TOKENS] - ints[CONFIG, PICKED] < ints[CONFIG, PERIOD]:
        return 0, 0
    ints[CONFIG, PICKED] = ints[CONFIG, TOKENS]
    n = ints[CONFIG, N_ITEMS]
    order = np.argsort(ints[STAMP, :n], kind="mergesort")
    order = order[np.argsort(reals[COUNT, :n][order], kind="mergesort")]  # the least wanted first
    was_member = ints[RESIDENT, :n].copy()
    swaps = 0
    low = 0
    for i in range(n - 1, -1, -1):
        best = order[i]
        if was_member[best]:
            continue
        while low < n and not (was_member[order[low]] and ints[RESIDENT, order[low]]):
            low += 1
        if low == n or reals[COUNT, best] <= HYSTERESIS * reals[COUNT, order[low]]:
            break
        weakest = _gives_way(ints, reals, order, was_member, low, best)
        if weakest == NOWHERE:
            continue
        ints[RESIDENT, weakest], ints[RESIDENT, best] = 0, 1
        ints[CONFIG, USED] += ints[SIZE, best] - ints[SIZE, weakest]
        ints[VICTIMS, swaps], ints[UPLOADS, swaps] = weakest, best
        swaps += 1
    reals[COUNT, :] *= KEPT_SHARE
    return swaps, swaps


@compiled_if_possible
def _gives_way(
    ints: Ints, reals: Floats, order: npt.NDArray[np.int64], was_member: npt.NDArray[np.int64], low: int, best: int
) -> int:
    """The least used member, from place `low` of `order` on, that `best` may replace and that leaves it room; -1 for none."""
    needed = ints[CONFIG, USED] + ints[SIZE, best] - ints[CONFIG, CAPACITY]
    for i in range(low, len(order)):
        member = order[i]
        if not was_member[member] or not ints[RESIDENT, member]:
            continue
        if reals[COUNT, best] <= HYSTERESIS * reals[COUNT, member]:
            return NOWHERE
        if ints[SIZE, member] >= needed:
            return int(member)
    return NOWHERE
