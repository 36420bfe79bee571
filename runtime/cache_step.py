"""One step of a cache: a call of the router comes in, and out come the experts to load and those to give up.

The model is the same for all policies, in a running model and in the simulator.  One call is one layer of one ubatch: its
distinct experts are looked up in the cache as it stands before the call, in slot order; a repeated id refreshes its recency;
an expert of the call is never evicted to make room for another of the same call.  A call that is larger than the cache is
served whole; then the cache is cut to its capacity, by the policy, or with `keep_whole` not before the next call.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bel.runtime.cache_heap import heap_push, heap_remove
from bel.runtime.cache_lru import serve_lru
from bel.runtime.cache_repick import repick
from bel.runtime.cache_rows import (
    AGE,
    AT,
    CALL,
    CALLED,
    CAPACITY,
    CLOCK,
    CONFIG,
    COUNT,
    DECAY,
    HEAP,
    HEAP_SIZE,
    INCREMENT,
    KEEP_WHOLE,
    KIND,
    MISSED,
    N_ITEMS,
    NUMBERS,
    OWN,
    PRIORITY,
    RESIDENT,
    SIZE,
    STAMP,
    TOKENS,
    USED,
    VICTIMS,
    Floats,
    Ints,
)
from bel.runtime.cache_victims import access_arc, access_s3fifo, access_slru, bag_push, bag_remove, list_victim, random_victim
from bel.runtime.compiled import compiled_if_possible, inlined_if_possible
from bel.runtime.policies import ARC, BELADY, LFU_DECAY, LFU_FORGET, LFU_GHOST, LFUDA, LRU, RANDOM, REPICK, S3FIFO, SLRU, STATIC

_ANY_CALL = -2
_LARGE, _SMALLER = 1e200, 1e-200


@compiled_if_possible
def serve(
    ints: Ints, reals: Floats, ids: npt.NDArray[np.uint16], first: int, last: int, base: int, ticks: bool
) -> tuple[int, int, int, int, int]:
    """Serve the call of rows `first` to `last` of `ids` (R, top_k) in slot order; item = `base` + id.

    `ticks`: its rows count as tokens, for what is counted in tokens (false for all layers but one of a shared cache).

    Returns the numbers (distinct, missed, victims, cut, uploads).  `ints[OWN, :distinct]`, the distinct items;
    `ints[MISSED, :missed]`, those to load, in slot order; `ints[VICTIMS, :victims]`, to give up before they are loaded, and
    behind those `cut` items of this call to give up after it.  `ints[UPLOADS, :uploads]` are to be loaded although the call
    does not use them (repick); what they replace is among the victims.
    """
    kind = ints[CONFIG, KIND]
    uploads, victims = repick(ints, reals) if kind == REPICK else (0, 0)
    ints[CONFIG, CALL] += 1
    if kind == LRU:
        return serve_lru(ints, ids, first, last, base, ticks)
    distinct, missed = _look_up(ints, reals, ids, first, last, base, ticks)
    if kind in (STATIC, REPICK):
        cut = _pass_through(ints, missed, victims)
        return distinct, missed, victims, cut, uploads
    victims = _evict(ints, reals, ints[CONFIG, CALL], 0)
    _enter(ints, reals, distinct)
    cut = 0
    if ints[CONFIG, USED] > ints[CONFIG, CAPACITY] and not ints[CONFIG, KEEP_WHOLE]:
        cut = _evict(ints, reals, _ANY_CALL, victims) - victims
    return distinct, missed, victims, cut, uploads


@inlined_if_possible
def _look_up(
    ints: Ints, reals: Floats, ids: npt.NDArray[np.uint16], first: int, last: int, base: int, ticks: bool
) -> tuple[int, int]:
    """Count, refresh and mark; everything of the call is in the cache afterwards, which may be too full."""
    kind, call = ints[CONFIG, KIND], ints[CONFIG, CALL]
    counts_rows = kind in (LFU_DECAY, LFUDA, REPICK)
    counts_calls = kind in (LFU_FORGET, LFU_GHOST)
    is_set = kind in (STATIC, REPICK)
    is_listed = kind in (SLRU, ARC, S3FIFO)
    clock = ints[CONFIG, CLOCK]  # a local number: one in an array is written and read again at every access
    distinct = 0
    missed = 0
    for row in range(first, last):
        if ticks:
            ints[CONFIG, TOKENS] += 1
            if reals[NUMBERS, DECAY] < 1:
                _forget(ints, reals)
        for slot in range(ids.shape[1]):
            item = base + int(np.int64(ids[row, slot]))  # of an unsigned number the compiler makes a float
            is_first = ints[CALLED, item] != call
            if is_first:
                ints[OWN, distinct] = item
                distinct += 1
                ints[CALLED, item] = call
                if not ints[RESIDENT, item]:
                    ints[MISSED, missed] = item
                    missed += 1
                    if not is_set:
                        ints[RESIDENT, item] = 1
                        ints[CONFIG, USED] += ints[SIZE, item]
                elif kind == RANDOM:
                    bag_remove(ints, item)
                elif not is_listed and ints[AT, item] >= 0:
                    heap_remove(ints, reals, item)
            clock += 1
            ints[STAMP, item] = clock
            if counts_rows:
                reals[COUNT, item] += reals[NUMBERS, INCREMENT]
            elif counts_calls:
                reals[COUNT, item] += is_first
            elif kind == SLRU:
                access_slru(ints, item, is_first)
            elif kind == ARC:
                access_arc(ints, reals, item, is_first)
            elif kind == S3FIFO:
                access_s3fifo(ints, reals, item, is_first)
    ints[CONFIG, CLOCK] = clock
    return distinct, missed


@compiled_if_possible
def _forget(ints: Ints, reals: Floats) -> None:
    """Make new uses count more, which is to make old ones count less; and keep the numbers small."""
    reals[NUMBERS, INCREMENT] /= reals[NUMBERS, DECAY]
    if reals[NUMBERS, INCREMENT] < _LARGE:
        return
    reals[NUMBERS, INCREMENT] *= _SMALLER
    n = ints[CONFIG, N_ITEMS]
    for item in range(n):
        reals[COUNT, item] *= _SMALLER
    if ints[CONFIG, KIND] != LFU_DECAY:
        return
    for item in range(n):
        reals[PRIORITY, item] *= _SMALLER
    size = ints[CONFIG, HEAP_SIZE]
    ints[CONFIG, HEAP_SIZE] = 0
    for place in range(size):  # counts that became equal are in the order of their last use now
        heap_push(ints, reals, ints[HEAP, place])


@compiled_if_possible
def _pass_through(ints: Ints, missed: int, victims: int) -> int:
    """Misses of a fixed set: repick fills free slots with them, all others are given up after the call."""
    cut = 0
    for i in range(missed):
        item = ints[MISSED, i]
        if ints[CONFIG, KIND] == REPICK and ints[CONFIG, USED] + ints[SIZE, item] <= ints[CONFIG, CAPACITY]:
            ints[RESIDENT, item] = 1
            ints[CONFIG, USED] += ints[SIZE, item]
        else:
            ints[VICTIMS, victims + cut] = item
            cut += 1
    return cut


@inlined_if_possible
def _evict(ints: Ints, reals: Floats, call: int, found: int) -> int:
    """Evict until the rest fits, sparing the items of `call`; they stand in `victims` from `found` on.  Returns their end."""
    kind = ints[CONFIG, KIND]
    while ints[CONFIG, USED] > ints[CONFIG, CAPACITY]:
        if kind in (SLRU, ARC, S3FIFO):
            item = list_victim(ints, reals, call)
        elif ints[CONFIG, HEAP_SIZE] == 0:
            item = -1
        elif kind == RANDOM:
            item = random_victim(ints)
        else:
            item = ints[HEAP, 0]
            heap_remove(ints, reals, item)
            if kind == LFUDA:
                reals[NUMBERS, AGE] = reals[PRIORITY, item]
            elif kind == LFU_FORGET:
                reals[COUNT, item] = 0
        if item < 0:
            break
        ints[RESIDENT, item] = 0
        ints[CONFIG, USED] -= ints[SIZE, item]
        ints[VICTIMS, found] = item
        found += 1
    return found


@inlined_if_possible
def _enter(ints: Ints, reals: Floats, distinct: int) -> None:
    """Let the call's items be evicted from now on, by the policies that keep them in the heap."""
    kind = ints[CONFIG, KIND]
    if kind in (SLRU, ARC, S3FIFO):
        return
    for i in range(distinct):
        item = ints[OWN, i]
        if kind == RANDOM:
            bag_push(ints, item)
            continue
        if kind == LFUDA:
            reals[PRIORITY, item] = reals[NUMBERS, AGE] + reals[COUNT, item] / reals[NUMBERS, INCREMENT]
        elif kind == BELADY:
            reals[PRIORITY, item] = -reals[COUNT, item]  # the caller's: the next call that uses the item
        else:
            reals[PRIORITY, item] = reals[COUNT, item]
        heap_push(ints, reals, item)
