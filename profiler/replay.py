"""A recorded run served from a cache, call by call: what missed, for any policy of the runtime.

The access model and the policies are the runtime's (`cache_step.serve`), compiled.  A *stream* is what one cache sees of one
run: the calls of one layer, or of all layers in the order in which they were made.  LRU and Belady of one layer have exact
passes for all capacities at once (`curves.py`, `belady.py`), with the same results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bel.formats.trace_calls import LayerCalls
from bel.profiler.compiled import compiled
from bel.runtime.cache_rows import COUNT, MISSED, OWN, SIZE, UPLOADS, Floats, Ints
from bel.runtime.cache_state import make_cache, preload
from bel.runtime.cache_step import serve
from bel.runtime.policies import BELADY, Policy

Counted = npt.NDArray[np.bool_]
BELADY_POLICY = Policy("belady", BELADY)
"""Evicts what is used again last, of what is never used again the one used longest ago.  A policy of the simulator only."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The calls of one run that one cache sees, in time order: C calls of N ids.

    `ids` (N,) u16: the rows of each call in slot order, call after call; those of call c are `id_start[c]` to
    `id_start[c + 1]` (C + 1,) i64, `top_k[c]` (C,) i64 in a row.  `place` (C,) i64: the place of the call's layer among the
    model's.  An id's item is `base[c]` (C,) i64 + id, of `n_items` in all.  `counted` (C,) bool: the calls whose hits count.
    `ticks` (C,) bool: the calls whose rows are the tokens of the run.
    """

    ids: npt.NDArray[np.uint16]
    id_start: npt.NDArray[np.int64]
    top_k: npt.NDArray[np.int64]
    place: npt.NDArray[np.int64]
    base: npt.NDArray[np.int64]
    counted: Counted
    ticks: npt.NDArray[np.bool_]
    n_items: int


@dataclass(frozen=True, slots=True)
class Replayed:
    """What each call of a stream did, (C,) each.

    `distinct` i32 experts were looked up, of which `misses` i32 were not resident, and `cold` i32 had never been used
    before in the run.  `uploads` i32 experts were loaded besides (repick), of the summed size `uploaded` i64.
    """

    distinct: npt.NDArray[np.int32]
    misses: npt.NDArray[np.int32]
    cold: npt.NDArray[np.int32]
    uploads: npt.NDArray[np.int32]
    uploaded: npt.NDArray[np.int64]


def layer_stream(calls: LayerCalls, counted: Counted, place: int = 0) -> Stream:
    """What a cache of one layer sees.  `counted` (C,)."""
    many = len(calls.phase)
    return Stream(
        ids=np.ascontiguousarray(calls.ids).reshape(-1),
        id_start=calls.row_start * calls.info.top_k,
        top_k=np.full(many, calls.info.top_k),
        place=np.full(many, place),
        base=np.zeros(many, np.int64),
        counted=counted,
        ticks=np.ones(many, np.bool_),
        n_items=calls.info.n_expert,
    )


def first_items(layers: Sequence[LayerCalls]) -> list[int]:
    """The item of expert 0 of each layer in a cache of all layers."""
    return [int(n) for n in np.cumsum([0, *(x.info.n_expert for x in layers[:-1])])]


def global_stream(layers: Sequence[LayerCalls], counted: Sequence[Counted]) -> Stream:
    """What one cache of all layers sees: their calls in the order of the run.  Tokens are those of the layer with most."""
    bases = first_items(layers)
    sizes = [len(x.phase) for x in layers]
    place = np.repeat(np.arange(len(layers)), sizes)
    order = np.argsort(np.concatenate([x.order for x in layers]), kind="stable")
    lengths = np.concatenate([x.rows_per_call * x.info.top_k for x in layers])
    starts = np.cumsum(lengths) - lengths
    together = np.concatenate([x.ids.reshape(-1) for x in layers])
    id_start = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[order])])
    ids = np.empty_like(together)
    _gather(together, starts[order], id_start, ids)
    busiest = int(np.argmax([len(x.ids) for x in layers]))
    place = place[order]
    return Stream(
        ids=ids,
        id_start=id_start,
        top_k=np.array([x.info.top_k for x in layers])[place],
        place=place,
        base=np.array(bases)[place],
        counted=np.concatenate(list(counted))[order],
        ticks=place == busiest,
        n_items=bases[-1] + layers[-1].info.n_expert,
    )


@compiled
def _gather(
    source: npt.NDArray[np.uint16],
    source_start: npt.NDArray[np.int64],
    start: npt.NDArray[np.int64],
    target: npt.NDArray[np.uint16],
) -> None:
    for c in range(len(source_start)):
        shift = source_start[c] - start[c]
        for i in range(start[c], start[c + 1]):
            target[i] = source[i + shift]


def replay(
    policy: Policy,
    stream: Stream,
    sizes: Ints,
    capacity: int,
    *,
    keep_whole: bool = False,
    preloaded: Sequence[int] = (),
    seed: int = 1,
) -> Replayed:
    """Serve a stream from a cache of `capacity` for items of `sizes` (n_items,) i64, empty but for `preloaded` items.

    Those are loaded in their order as far as there is room, and are never a cold miss.  `keep_whole` as in `make_cache`.
    """
    state = make_cache(policy, sizes, capacity, keep_whole=keep_whole, seed=seed)
    preload(state, preloaded)
    many = len(stream.counted)
    next_use = foresight(policy, stream)
    counts = np.zeros((4, many), np.int32)
    uploaded = np.zeros(many, np.int64)
    where = (stream.ids, stream.id_start, stream.top_k, stream.base, stream.ticks)
    _replay(state.ints, state.reals, *where, next_use, stream.n_items, len(preloaded) > 0, counts, uploaded)
    return Replayed(counts[0], counts[1], counts[2], counts[3], uploaded)


def foresight(policy: Policy, stream: Stream) -> npt.NDArray[np.int64]:
    """What a policy knows of the future: `next_uses` for Belady, nothing (0,) for all others."""
    return next_uses(stream) if policy.kind == BELADY else np.empty(0, np.int64)


def next_uses(stream: Stream) -> npt.NDArray[np.int64]:
    """For each id (N,) i64 the next call that uses its item and counts; the number of calls where there is none."""
    next_use = np.empty(len(stream.ids), np.int64)
    _next_uses(stream.ids, stream.id_start, stream.base, stream.counted, stream.n_items, next_use)
    return next_use


@compiled
def _next_uses(
    ids: npt.NDArray[np.uint16],
    id_start: npt.NDArray[np.int64],
    base: npt.NDArray[np.int64],
    counted: npt.NDArray[np.bool_],
    n_items: int,
    next_use: npt.NDArray[np.int64],
) -> None:
    """Write for each id the call that uses its item next, the number of calls where none does or where it does not count."""
    never = len(counted)
    upcoming = np.full(n_items, never, np.int64)
    for c in range(len(counted) - 1, -1, -1):
        for i in range(id_start[c], id_start[c + 1]):
            next_use[i] = upcoming[base[c] + np.int64(ids[i])]
        for i in range(id_start[c], id_start[c + 1]):
            # An uncounted call brings the expert in by itself: to have kept it until then is worth nothing.
            upcoming[base[c] + np.int64(ids[i])] = c if counted[c] else never


@compiled
def _replay(
    ints: Ints,
    reals: Floats,
    ids: npt.NDArray[np.uint16],
    id_start: npt.NDArray[np.int64],
    top_k: npt.NDArray[np.int64],
    base: npt.NDArray[np.int64],
    ticks: npt.NDArray[np.bool_],
    next_use: npt.NDArray[np.int64],
    n_items: int,
    has_preloaded: bool,
    counts: npt.NDArray[np.int32],
    uploaded: npt.NDArray[np.int64],
) -> None:
    """Fill `counts` (4, C), the first four of Replayed, and `uploaded` (C,)."""
    seen = np.zeros(n_items, np.bool_)
    start = int(np.int64(0))  # a literal 0 has a type of its own: all policies would be compiled a second time for it
    width = top_k[0] if len(top_k) else 1
    is_even = (top_k == width).all()
    table = ids[: len(ids) // width * width].reshape((len(ids) // width, width))
    for c in range(len(top_k)):
        first, last = id_start[c], id_start[c + 1]
        if len(next_use):
            for i in range(first, last):
                reals[COUNT, base[c] + np.int64(ids[i])] = next_use[i]
        if is_even:  # a view for each call would take a fifth of the time
            distinct, missed, _, _, uploads = serve(ints, reals, table, first // width, last // width, base[c], ticks[c])
        else:
            rows = (last - first) // top_k[c]
            call = ids[first:last].reshape((rows, top_k[c]))
            distinct, missed, _, _, uploads = serve(ints, reals, call, start, rows, base[c], ticks[c])
        counts[0, c] = distinct
        counts[1, c] = missed
        counts[3, c] = uploads
        cold = 0
        for i in range(missed):
            item = ints[MISSED, i]
            if not seen[item]:
                cold += 1
                seen[item] = True
        counts[2, c] = cold
        if has_preloaded:  # what has never missed may have been used
            for i in range(distinct):
                seen[ints[OWN, i]] = True
        for i in range(uploads):
            uploaded[c] += ints[SIZE, ints[UPLOADS, i]]
