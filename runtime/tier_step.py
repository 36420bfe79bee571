"""One call of a router in three tiers, VRAM, RAM and NVMe: what comes from where, and what leaves each.

`bel.profiler.tier_links` has the rules in words.  The VRAM tier is a cache with any policy (`cache_step.serve`); the RAM tier
is a list of items in the order in which they came or were read, of which the oldest leaves.  Both are arrays of CacheState,
one above the other: a cache for each layer, or one for all.  An *item of the run* is the first item of a layer + expert id,
whatever the caches are.  Compiled for the simulator; a running model takes the same source.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bel.runtime.cache_heap import heap_remove
from bel.runtime.cache_list import list_oldest, list_push, list_refresh, list_remove
from bel.runtime.cache_rows import (
    CALLED,
    CAPACITY,
    CONFIG,
    COUNT,
    IN_LIST,
    KIND,
    MISSED,
    NOWHERE,
    OWN,
    RECENT,
    RESIDENT,
    SIZE,
    STAMP,
    UPLOADS,
    USED,
    VICTIMS,
    Floats,
    Ints,
)
from bel.runtime.cache_victims import bag_remove
from bel.runtime.compiled import compiled_if_possible, inlined_if_possible
from bel.runtime.policies import ARC, LFU_FORGET, LRU, RANDOM, REPICK, S3FIFO, SLRU, STATIC

EXCLUSIVE, INCLUSIVE, COPY_ON_READ = range(3)
VRAM_STATE, VRAM_ITEM, RAM_STATE, RAM_ITEM, BYTES = range(5)
"""Rows of `places`: which cache of each tier an item of the run may be in, as which item of it, and its bytes."""
PLACE_ROWS = 5
DISTINCT, FROM_RAM, FROM_NVME, COLD, ON_CPU, UPLOADED, NVME_READS, RAM_LOADS = range(8)
"""Rows of `counts`.  The last two are what goes over the links, with the uploads: reads from NVMe, and loads into VRAM of what
RAM had."""
COUNTS = 8
NVME, H2D, D2H = range(3)
"""Rows of `moved`."""
LINKS = 3
_ANY_CALL = -2


@inlined_if_possible
def meet_in_line(
    vram: Ints,
    reals: Floats,
    ram: Ints,
    places: Ints,
    seen: npt.NDArray[np.bool_],
    first: int,
    served: tuple[int, int, int, int, int],
    kind: int,
    on_cpu: bool,
    c: int,
    column: int,
    counts: npt.NDArray[np.int32],
    moved: Ints,
) -> None:
    """Behind `serve`, which returned `served`, have call `c` of the run, from 0, move items between the tiers.

    `vram` and `reals` (caches, rows, columns), `ram` likewise, `places` (5, items of the run), `seen` (items of the run,) says
    what was ever used; `first` is the first item of the call's layer.  `kind` is that of the RAM tier; `on_cpu`: misses are
    computed and not loaded.  Adds to a column of `counts` (COUNTS, C) and of `moved` (LINKS, C), in units of BYTES.
    """
    distinct, missed, victims, cut, uploads = served
    v = vram[places[VRAM_STATE, first]]
    zero = first - places[VRAM_ITEM, first]  # the item of the run that is item 0 of this VRAM cache
    start = int(np.int64(0))  # a literal 0 has a type of its own: all would be compiled a second time for it
    counts[DISTINCT, column] = distinct
    for i in range(distinct):
        item = zero + v[OWN, i]
        ram[places[RAM_STATE, item], CALLED, places[RAM_ITEM, item]] = c
    given_up = start
    if v[CONFIG, KIND] == REPICK:  # its victims left before the call, which may miss them
        for i in range(uploads):
            item = zero + v[UPLOADS, i]
            is_found = _bring(ram, places, item, c, kind != EXCLUSIVE)
            counts[UPLOADED, column] += 1
            counts[RAM_LOADS if is_found else NVME_READS, column] += 1
            moved[NVME, column] += 0 if is_found else places[BYTES, item]
            moved[H2D, column] += places[BYTES, item]
        moved[D2H, column] += _give_up(ram, places, v, start, victims, zero, kind, c)
        for i in range(uploads):
            _settle(vram, reals, ram, places, zero + v[UPLOADS, i], kind, c)
        given_up = victims
    for i in range(missed):
        item = zero + v[MISSED, i]
        is_computed = on_cpu and not v[RESIDENT, v[MISSED, i]]
        is_found = _bring(ram, places, item, c, is_computed or kind != EXCLUSIVE)
        counts[FROM_RAM if is_found else FROM_NVME, column] += 1
        counts[COLD, column] += not is_found and not seen[item]
        counts[ON_CPU, column] += is_computed
        counts[NVME_READS, column] += not is_found
        counts[RAM_LOADS, column] += is_found and not is_computed
        moved[NVME, column] += 0 if is_found else places[BYTES, item]
        moved[H2D, column] += 0 if is_computed else places[BYTES, item]
    for i in range(distinct):
        seen[zero + v[OWN, i]] = True
    if not on_cpu:
        moved[D2H, column] += _give_up(ram, places, v, given_up, victims + cut, zero, kind, c)
    for i in range(missed):
        _settle(vram, reals, ram, places, zero + v[MISSED, i], kind, c)


@compiled_if_possible
def meet_call(
    vram: Ints,
    reals: Floats,
    ram: Ints,
    places: Ints,
    seen: npt.NDArray[np.bool_],
    first: int,
    served: tuple[int, int, int, int, int],
    kind: int,
    on_cpu: bool,
    c: int,
    column: int,
    counts: npt.NDArray[np.int32],
    moved: Ints,
) -> None:
    """`meet_in_line` for one call at a time; in a loop over millions of them it costs an eighth."""
    meet_in_line(vram, reals, ram, places, seen, first, served, kind, on_cpu, c, column, counts, moved)


def fits_in_ram(r: Ints, item: int) -> bool:
    """Whether an item of a RAM cache is not in it and would fit."""
    return not r[RESIDENT, item] and bool(r[CONFIG, USED] + r[SIZE, item] <= r[CONFIG, CAPACITY])


def preload_ram(r: Ints, item: int, *, stays: bool = False) -> None:
    """Put an item into RAM before the first call, as what leaves first, or never."""
    r[RESIDENT, item] = 1
    r[CONFIG, USED] += r[SIZE, item]
    if not stays:
        list_push(r, RECENT, item, True)


@compiled_if_possible
def _give_up(ram: Ints, places: Ints, v: Ints, first: int, last: int, zero: int, kind: int, call: int) -> int:
    """Those of VICTIMS from `first` to `last` leave VRAM; the bytes that are moved to RAM."""
    moved = 0
    for i in range(first, last):
        item = zero + v[VICTIMS, i]
        if kind == EXCLUSIVE:
            moved += _demote(ram, places, item, call)
        elif kind == INCLUSIVE:
            _unpin(ram, places, item)
    return moved


@compiled_if_possible
def _bring(ram: Ints, places: Ints, item: int, call: int, stays: bool) -> bool:
    """Take an item from RAM, or from NVMe past it; whether it was in RAM.  `stays`: it is in RAM afterwards."""
    r, at = ram[places[RAM_STATE, item]], places[RAM_ITEM, item]
    is_found = bool(r[RESIDENT, at])
    r[STAMP, at] = call + 1
    if not stays:
        if is_found:
            _leave(r, at)
    elif not is_found:
        _admit(r, at)
    elif r[IN_LIST, at] != NOWHERE:
        list_refresh(r, RECENT, at)
    return is_found


@compiled_if_possible
def _demote(ram: Ints, places: Ints, item: int, call: int) -> int:
    """Put an item that left VRAM into RAM.  The bytes to move: none where this very call brought it through RAM."""
    r, at = ram[places[RAM_STATE, item]], places[RAM_ITEM, item]
    if not _admit(r, at):
        return 0
    while r[CONFIG, USED] > r[CONFIG, CAPACITY]:
        _leave(r, list_oldest(r, RECENT, _ANY_CALL))
    return 0 if r[STAMP, at] == call + 1 else int(places[BYTES, item])


@compiled_if_possible
def _settle(vram: Ints, reals: Floats, ram: Ints, places: Ints, item: int, kind: int, call: int) -> None:
    """Cut the RAM that an item came into to its capacity; an inclusive one takes what leaves it out of VRAM."""
    r, at = ram[places[RAM_STATE, item]], places[RAM_ITEM, item]
    while r[CONFIG, USED] > r[CONFIG, CAPACITY]:
        oldest = list_oldest(r, RECENT, call)
        if oldest == NOWHERE:
            oldest = list_oldest(r, RECENT, _ANY_CALL)
        _leave(r, oldest)
        if kind == INCLUSIVE:
            _expel(vram, reals, places, item - at + oldest)
    if kind != INCLUSIVE or r[CONFIG, CAPACITY] == 0:
        return
    v = vram[places[VRAM_STATE, item]]
    if not v[RESIDENT, places[VRAM_ITEM, item]]:
        return
    if not r[RESIDENT, at]:
        _expel(vram, reals, places, item)
    elif v[CONFIG, KIND] in (STATIC, REPICK) and r[IN_LIST, at] != NOWHERE:
        list_remove(r, at)  # else the misses would push the members of a set out of RAM, and so out of the set


@compiled_if_possible
def _unpin(ram: Ints, places: Ints, item: int) -> None:
    r, at = ram[places[RAM_STATE, item]], places[RAM_ITEM, item]
    if r[RESIDENT, at] and r[IN_LIST, at] == NOWHERE:
        list_push(r, RECENT, at, False)


@compiled_if_possible
def _admit(r: Ints, at: int) -> bool:
    """Add an item to RAM as its newest, unless RAM could not hold even it alone; whether it is in."""
    if r[SIZE, at] > r[CONFIG, CAPACITY]:
        return False
    r[RESIDENT, at] = 1
    r[CONFIG, USED] += r[SIZE, at]
    list_push(r, RECENT, at, False)
    return True


@compiled_if_possible
def _leave(r: Ints, at: int) -> None:
    r[RESIDENT, at] = 0
    r[CONFIG, USED] -= r[SIZE, at]
    list_remove(r, at)


@compiled_if_possible
def _expel(vram: Ints, reals: Floats, places: Ints, item: int) -> None:
    """Take an item out of VRAM where it is there, against its policy."""
    state, at = places[VRAM_STATE, item], places[VRAM_ITEM, item]
    v, v_reals = vram[state], reals[state]
    if not v[RESIDENT, at]:
        return
    v[RESIDENT, at] = 0
    v[CONFIG, USED] -= v[SIZE, at]
    kind = v[CONFIG, KIND]
    if kind in (LRU, SLRU, ARC, S3FIFO):
        list_remove(v, at)
    elif kind == RANDOM:
        bag_remove(v, at)
    elif kind not in (STATIC, REPICK):
        heap_remove(v, v_reals, at)
    if kind in (S3FIFO, LFU_FORGET):
        v_reals[COUNT, at] = 0
