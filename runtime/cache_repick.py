"""A fixed set that is chosen again every N tokens by the uses since, with hysteresis so that the set does not flutter."""

from __future__ import annotations

from bel.runtime.cache_rows import (
    CAPACITY,
    CONFIG,
    COUNT,
    N_ITEMS,
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
    """Swap members for better ones when a period is over.  The numbers of uploads and of victims."""
    if ints[CONFIG, TOKENS] - ints[CONFIG, PICKED] < ints[CONFIG, PERIOD]:
        return 0, 0
    ints[CONFIG, PICKED] = ints[CONFIG, TOKENS]
    swaps = 0
    while True:
        weakest, best = _weakest(ints, reals), _best(ints, reals)
        if weakest < 0 or best < 0 or reals[COUNT, best] <= HYSTERESIS * reals[COUNT, weakest]:
            break
        if ints[CONFIG, USED] - ints[SIZE, weakest] + ints[SIZE, best] > ints[CONFIG, CAPACITY]:
            break
        ints[RESIDENT, weakest], ints[RESIDENT, best] = 0, 1
        ints[CONFIG, USED] += ints[SIZE, best] - ints[SIZE, weakest]
        ints[VICTIMS, swaps], ints[UPLOADS, swaps] = weakest, best
        swaps += 1
    reals[COUNT, :] *= KEPT_SHARE
    return swaps, swaps


@compiled_if_possible
def _weakest(ints: Ints, reals: Floats) -> int:
    found = -1
    for item in range(ints[CONFIG, N_ITEMS]):
        if ints[RESIDENT, item] and (
            found < 0
            or reals[COUNT, item] < reals[COUNT, found]
            or (reals[COUNT, item] == reals[COUNT, found] and ints[STAMP, item] < ints[STAMP, found])
        ):
            found = item
    return found


@compiled_if_possible
def _best(ints: Ints, reals: Floats) -> int:
    found = -1
    for item in range(ints[CONFIG, N_ITEMS]):
        if not ints[RESIDENT, item] and (
            found < 0
            or reals[COUNT, item] > reals[COUNT, found]
            or (reals[COUNT, item] == reals[COUNT, found] and ints[STAMP, item] > ints[STAMP, found])
        ):
            found = item
    return found
