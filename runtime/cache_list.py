"""Ring lists inside a CacheState: the newest item stands behind the list's end, the oldest before it."""

from __future__ import annotations

from bel.runtime.cache_rows import AFTER, BEFORE, CALLED, CONFIG, IN_LIST, LIST_SIZE, N_ITEMS, NOWHERE, SIZE, Ints
from bel.runtime.compiled import inlined_if_possible


@inlined_if_possible
def list_push(ints: Ints, number: int, item: int, oldest: bool) -> None:
    """Put an item that is in no list into list `number`, as its newest or its oldest."""
    end = ints[CONFIG, N_ITEMS] + number
    left = ints[BEFORE, end] if oldest else end
    right = ints[AFTER, left]
    ints[AFTER, left], ints[BEFORE, item] = item, left
    ints[AFTER, item], ints[BEFORE, right] = right, item
    ints[IN_LIST, item] = number
    ints[LIST_SIZE, number] += ints[SIZE, item]


@inlined_if_possible
def list_remove(ints: Ints, item: int) -> None:
    """Take an item out of the list that it is in."""
    left, right = ints[BEFORE, item], ints[AFTER, item]
    ints[AFTER, left], ints[BEFORE, right] = right, left
    ints[LIST_SIZE, ints[IN_LIST, item]] -= ints[SIZE, item]
    ints[IN_LIST, item] = NOWHERE


@inlined_if_possible
def list_refresh(ints: Ints, number: int, item: int) -> None:
    """Make an item the newest of list `number`, wherever it was."""
    was = ints[IN_LIST, item]
    if was != number:
        if was != NOWHERE:
            list_remove(ints, item)
        list_push(ints, number, item, False)
        return
    end = ints[CONFIG, N_ITEMS] + number
    left = ints[BEFORE, item]
    if left == end:
        return
    right = ints[AFTER, item]
    ints[AFTER, left], ints[BEFORE, right] = right, left
    second = ints[AFTER, end]
    ints[AFTER, end], ints[BEFORE, item] = item, end
    ints[AFTER, item], ints[BEFORE, second] = second, item


@inlined_if_possible
def list_oldest(ints: Ints, number: int, call: int) -> int:
    """The oldest item of a list that the call does not use (any, for a call of -2); -1 where there is none."""
    end = ints[CONFIG, N_ITEMS] + number
    item = ints[BEFORE, end]
    while item != end and ints[CALLED, item] == call:
        item = ints[BEFORE, item]
    return NOWHERE if item == end else item
