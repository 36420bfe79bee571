"""The heap inside a CacheState: on top the item with the least priority, of equals the one used longest ago."""

from __future__ import annotations

from bel.runtime.cache_rows import AT, CONFIG, HEAP, HEAP_SIZE, NOWHERE, PRIORITY, STAMP, Floats, Ints
from bel.runtime.compiled import inlined_if_possible


@inlined_if_possible
def _is_less(ints: Ints, reals: Floats, a: int, b: int) -> bool:
    if reals[PRIORITY, a] != reals[PRIORITY, b]:
        return bool(reals[PRIORITY, a] < reals[PRIORITY, b])
    return bool(ints[STAMP, a] < ints[STAMP, b])


@inlined_if_possible
def _up(ints: Ints, reals: Floats, place: int, item: int) -> None:
    while place > 0:
        parent = (place - 1) // 2
        other = ints[HEAP, parent]
        if not _is_less(ints, reals, item, other):
            break
        ints[HEAP, place], ints[AT, other] = other, place
        place = parent
    ints[HEAP, place], ints[AT, item] = item, place


@inlined_if_possible
def _down(ints: Ints, reals: Floats, place: int, item: int) -> None:
    size = ints[CONFIG, HEAP_SIZE]
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and _is_less(ints, reals, ints[HEAP, child + 1], ints[HEAP, child]):
            child += 1
        other = ints[HEAP, child]
        if not _is_less(ints, reals, other, item):
            break
        ints[HEAP, place], ints[AT, other] = other, place
        place = child
    ints[HEAP, place], ints[AT, item] = item, place


@inlined_if_possible
def heap_push(ints: Ints, reals: Floats, item: int) -> None:
    """Add an item that is not in the heap."""
    place = ints[CONFIG, HEAP_SIZE]
    ints[CONFIG, HEAP_SIZE] += 1
    _up(ints, reals, place, item)


@inlined_if_possible
def heap_remove(ints: Ints, reals: Floats, item: int) -> None:
    """Take an item out, wherever it stands."""
    place = ints[AT, item]
    ints[AT, item] = NOWHERE
    ints[CONFIG, HEAP_SIZE] -= 1
    last = ints[HEAP, ints[CONFIG, HEAP_SIZE]]
    if last == item:
        return
    _down(ints, reals, place, last)
    if ints[AT, last] == place:
        _up(ints, reals, place, last)
