"""The state of one cache of experts, as arrays that compiled code changes: what is resident, and what a policy remembers.

An *item* is an expert of one layer (a cache of its own for each layer: item = expert id) or of any layer (one cache for all:
item = first item of the layer + expert id).  An item has a size: 1 where all are of one layer and the capacity is counted in
slots, else bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bel.runtime.cache_heap import heap_push
from bel.runtime.cache_list import list_push
from bel.runtime.cache_rows import (
    AFTER,
    AT,
    BEFORE,
    CALLED,
    CAPACITY,
    CONFIG,
    DECAY,
    IN_LIST,
    INCREMENT,
    INT_ROWS,
    KEEP_WHOLE,
    KIND,
    MIN_COLUMNS,
    MISSED,
    N_ITEMS,
    N_LISTS,
    NOWHERE,
    NUMBERS,
    PERIOD,
    RANDOM_STATE,
    REAL_ROWS,
    RESIDENT,
    SIZE,
    STAMP,
    UPLOADS,
    USED,
    VICTIMS,
    Floats,
    Ints,
)
from bel.runtime.cache_step import serve
from bel.runtime.cache_victims import bag_push
from bel.runtime.compiled import is_compiling
from bel.runtime.policies import ARC, LRU, RANDOM, REPICK, S3FIFO, SLRU, STATIC, Policy

_IS_COMPILED = is_compiling()


@dataclass(frozen=True, slots=True)
class CacheState:
    """`ints` (INT_ROWS, columns) i64 and `reals` (REAL_ROWS, columns) f64, as `cache_rows.py` says."""

    ints: Ints
    reals: Floats


@dataclass(frozen=True, slots=True)
class Step:
    """What one call asks of a cache: items, in the order in which they are used.

    `missed` must be loaded before the call is computed, `victims` given up before that; `cut` are items of the call to give up
    after it; `uploads` are loaded although the call does not use them (repick).  `distinct` items of the call in all.
    """

    distinct: int
    missed: list[int]
    victims: list[int]
    cut: list[int]
    uploads: list[int]


def make_cache(policy: Policy, sizes: Ints, capacity: int, *, keep_whole: bool = False, seed: int = 1) -> CacheState:
    """An empty cache of `capacity` for items of `sizes` (n,), in the same unit.

    `keep_whole`: a call that is larger than the cache stays in it until the next call has been looked up, as some replays
    have it; without it the cache is cut to its capacity, by the policy, right after the call.
    """
    n = len(sizes)
    columns = max(MIN_COLUMNS, n + N_LISTS)
    ints, reals = np.zeros((INT_ROWS, columns), np.int64), np.zeros((REAL_ROWS, columns), np.float64)
    values = {N_ITEMS: n, KIND: policy.kind, CAPACITY: capacity, KEEP_WHOLE: keep_whole, PERIOD: policy.period_tokens}
    for place, value in values.items():
        ints[CONFIG, place] = value
    ints[CONFIG, RANDOM_STATE] = seed % 2147483646 + 1
    reals[NUMBERS, DECAY], reals[NUMBERS, INCREMENT] = policy.decay, 1.0
    ints[SIZE, :n] = sizes
    ints[CALLED], ints[AT], ints[IN_LIST] = NOWHERE, NOWHERE, NOWHERE
    ints[BEFORE], ints[AFTER] = np.arange(columns), np.arange(columns)
    return CacheState(ints, reals)


def preload(state: CacheState, items: Iterable[int]) -> list[int]:
    """Make items resident before the first call as far as there is room; the first ones are evicted last.  Returns those."""
    return [item for item in items if _preload(state.ints, state.reals, item)]


def step(state: CacheState, ids: npt.NDArray[np.uint16], *, base: int = 0, ticks: bool = True) -> Step:
    """Serve one call, the rows `ids` (R, top_k) in slot order; see `cache_step.serve`."""
    ints, reals = state.ints, state.reals
    if _IS_COMPILED or ints[CONFIG, KIND] == REPICK:  # which sorts its arrays
        counts = serve(ints, reals, ids, 0, len(ids), base, ticks)
    else:  # a view of plain memory gives plain numbers: half the time of an array's
        views: tuple[Any, Any, Any] = (ints.data, reals.data, np.ascontiguousarray(ids).data)
        counts = serve(views[0], views[1], views[2], 0, len(ids), base, ticks)
    distinct, missed, victims, cut, uploads = counts
    return Step(
        distinct,
        ints[MISSED, :missed].tolist(),
        ints[VICTIMS, :victims].tolist(),
        ints[VICTIMS, victims : victims + cut].tolist(),
        ints[UPLOADS, :uploads].tolist(),
    )


def residents(state: CacheState) -> list[int]:
    """Items that are resident."""
    return [int(i) for i in np.flatnonzero(state.ints[RESIDENT, : state.ints[CONFIG, N_ITEMS]])]


def _preload(ints: Ints, reals: Floats, item: int) -> bool:
    kind = ints[CONFIG, KIND]
    if ints[RESIDENT, item]:
        return False
    if ints[CONFIG, USED] + ints[SIZE, item] > ints[CONFIG, CAPACITY]:
        return False
    ints[RESIDENT, item] = 1
    ints[CONFIG, USED] += ints[SIZE, item]
    ints[STAMP, item] = ints[STAMP].min() - 1  # used longer ago than what was loaded before it, and than any call
    if kind in (STATIC, REPICK):
        return True
    if kind in (LRU, SLRU, ARC, S3FIFO):
        list_push(ints, 0, item, True)
    elif kind == RANDOM:
        bag_push(ints, item)
    else:
        heap_push(ints, reals, item)
    return True
