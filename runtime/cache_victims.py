"""The policies that keep lists: what a use of an item changes in them, and which item is the least wanted.

Segmented LRU: R. Karedla et al., "Caching strategies to improve disk system performance", Computer 27(3), 1994.  ARC:
N. Megiddo and D. Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003.  S3-FIFO: J. Yang et al., "FIFO
queues are all you need for cache eviction", SOSP 2023.  Here sizes are sums of bytes where items differ in size.
"""

from __future__ import annotations

from bel.runtime.cache_list import list_oldest, list_push, list_refresh, list_remove
from bel.runtime.cache_rows import (
    AT,
    B1,
    B2,
    CAPACITY,
    CONFIG,
    COUNT,
    GHOST,
    HEAP,
    HEAP_SIZE,
    IN_LIST,
    KIND,
    LIST_SIZE,
    MAIN,
    NOWHERE,
    NUMBERS,
    PROBATION,
    PROTECTED,
    RANDOM_STATE,
    SIZE,
    SMALL,
    T1,
    T2,
    TARGET,
    Floats,
    Ints,
)
from bel.runtime.compiled import compiled_if_possible, inlined_if_possible
from bel.runtime.policies import ARC, SLRU

PROTECTED_SHARE = 0.8  # of the capacity: segmented LRU
SMALL_SHARE = 0.1  # of the capacity: S3-FIFO
MAX_FREQUENCY = 3


@compiled_if_possible
def access_slru(ints: Ints, item: int, is_first: bool) -> None:
    """A new item starts in probation; a hit protects it, and pushes the oldest protected ones back."""
    was = ints[IN_LIST, item]
    if was == NOWHERE:
        list_push(ints, PROBATION, item, False)
    elif not is_first:
        list_refresh(ints, was, item)
    else:
        list_refresh(ints, PROTECTED, item)
        while ints[LIST_SIZE, PROTECTED] > PROTECTED_SHARE * ints[CONFIG, CAPACITY]:
            list_refresh(ints, PROBATION, list_oldest(ints, PROTECTED, -2))


@compiled_if_possible
def access_arc(ints: Ints, reals: Floats, item: int, is_first: bool) -> None:
    """A second use moves to T2; a use that the ghosts remember moves the target size of T1 as well."""
    was, capacity = ints[IN_LIST, item], ints[CONFIG, CAPACITY]
    if not is_first:
        list_refresh(ints, was, item)
        return
    if was == B1:
        step = ints[SIZE, item] * max(1.0, ints[LIST_SIZE, B2] / ints[LIST_SIZE, B1])
        reals[NUMBERS, TARGET] = min(float(capacity), reals[NUMBERS, TARGET] + step)
    elif was == B2:
        step = ints[SIZE, item] * max(1.0, ints[LIST_SIZE, B1] / ints[LIST_SIZE, B2])
        reals[NUMBERS, TARGET] = max(0.0, reals[NUMBERS, TARGET] - step)
    if was == NOWHERE:
        list_push(ints, T1, item, False)
    else:
        list_refresh(ints, T2, item)


@compiled_if_possible
def access_s3fifo(ints: Ints, reals: Floats, item: int, is_first: bool) -> None:
    """A hit only counts; a new item starts in the small queue, one that the ghost queue remembers in the main queue."""
    was = ints[IN_LIST, item]
    if was == NOWHERE:
        list_push(ints, SMALL, item, False)
        reals[COUNT, item] = 0  # it may have left the ghost queue with a use
    elif was == GHOST:
        list_refresh(ints, MAIN, item)
        reals[COUNT, item] = 0
    elif is_first:
        reals[COUNT, item] = min(MAX_FREQUENCY, reals[COUNT, item] + 1)


@inlined_if_possible
def list_victim(ints: Ints, reals: Floats, call: int) -> int:
    """The item that the policy gives up next, taken out of its list; none of `call`; -1 where there is none."""
    kind = ints[CONFIG, KIND]
    if kind == SLRU:
        item = list_oldest(ints, PROBATION, call)
        if item < 0:
            item = list_oldest(ints, PROTECTED, call)
        if item >= 0:
            list_remove(ints, item)
        return item
    return _victim_arc(ints, reals, call) if kind == ARC else _victim_s3fifo(ints, reals, call)


@compiled_if_possible
def _victim_arc(ints: Ints, reals: Floats, call: int) -> int:
    capacity = ints[CONFIG, CAPACITY]
    first = T1 if ints[LIST_SIZE, T1] > reals[NUMBERS, TARGET] else T2
    item = list_oldest(ints, first, call)
    if item < 0:
        first = T1 + T2 - first
        item = list_oldest(ints, first, call)
    if item < 0:
        return item
    list_refresh(ints, B1 if first == T1 else B2, item)
    while ints[LIST_SIZE, T1] + ints[LIST_SIZE, B1] > capacity and ints[LIST_SIZE, B1] > 0:
        list_remove(ints, list_oldest(ints, B1, -2))
    while (
        ints[LIST_SIZE, T1] + ints[LIST_SIZE, T2] + ints[LIST_SIZE, B1] + ints[LIST_SIZE, B2] > 2 * capacity
        and ints[LIST_SIZE, B2] > 0
    ):
        list_remove(ints, list_oldest(ints, B2, -2))
    return item


@compiled_if_possible
def _victim_s3fifo(ints: Ints, reals: Floats, call: int) -> int:
    capacity = ints[CONFIG, CAPACITY]
    while True:
        item = -1
        if ints[LIST_SIZE, SMALL] > SMALL_SHARE * capacity:
            item = list_oldest(ints, SMALL, call)
        if item < 0:
            item = list_oldest(ints, MAIN, call)
        if item < 0:
            item = list_oldest(ints, SMALL, call)
        if item < 0:
            return item
        if ints[IN_LIST, item] == SMALL:
            if reals[COUNT, item] <= 1:
                break
            list_refresh(ints, MAIN, item)
            reals[COUNT, item] = 0
        else:
            if reals[COUNT, item] == 0:
                list_remove(ints, item)
                return item
            reals[COUNT, item] -= 1
            list_refresh(ints, MAIN, item)
    list_refresh(ints, GHOST, item)
    while ints[LIST_SIZE, GHOST] > (1 - SMALL_SHARE) * capacity and ints[LIST_SIZE, GHOST] > 0:
        list_remove(ints, list_oldest(ints, GHOST, -2))
    return item


@compiled_if_possible
def bag_push(ints: Ints, item: int) -> None:
    """Put an item into the bag of those that may be drawn."""
    place = ints[CONFIG, HEAP_SIZE]
    ints[HEAP, place], ints[AT, item] = item, place
    ints[CONFIG, HEAP_SIZE] += 1


@compiled_if_possible
def bag_remove(ints: Ints, item: int) -> None:
    """Take an item out of the bag of those that may be drawn."""
    place = ints[AT, item]
    ints[CONFIG, HEAP_SIZE] -= 1
    last = ints[HEAP, ints[CONFIG, HEAP_SIZE]]
    ints[HEAP, place], ints[AT, last] = last, place
    ints[AT, item] = NOWHERE


@compiled_if_possible
def random_victim(ints: Ints) -> int:
    """Draw an item of the bag (D. Lehmer's generator with the constants of S. Park and K. Miller, CACM 36(7), 1993)."""
    ints[CONFIG, RANDOM_STATE] = ints[CONFIG, RANDOM_STATE] * 48271 % 2147483647
    item = int(ints[HEAP, ints[CONFIG, RANDOM_STATE] % ints[CONFIG, HEAP_SIZE]])
    bag_remove(ints, item)
    return item
