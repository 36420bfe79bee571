"""LRU curves: equal to a replay with a plain list at every capacity, for every shape of call."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.trace import DECODE, PROMPT
from bel.formats.trace_calls import LayerCalls
from bel.formats.trace_header import TraceLayer
from bel.profiler.curves import lru_curves

Calls = list[tuple[int, list[list[int]]]]  # (phase, rows of expert ids)


def layer_of(calls: Calls, n_expert: int) -> LayerCalls:
    rows = [row for _, call in calls for row in call]
    top_k = len(rows[0]) if rows else 1
    count = np.array([len(call) for _, call in calls], np.int64)
    none = np.zeros(len(calls), np.int64)
    return LayerCalls(
        info=TraceLayer(0, n_expert, top_k, None),
        order=np.arange(len(calls)),
        phase=np.array([phase for phase, _ in calls], np.uint8),
        ubatch=none,
        row_start=np.concatenate([np.zeros(1, np.int64), np.cumsum(count)]),
        token=np.zeros(len(rows), np.int64),
        ids=np.array(rows, np.uint16).reshape(-1, top_k),
        weights=None,
        time_ns=None,
    )


def replay(calls: Calls, slots: int, *, cut: bool) -> tuple[list[int], list[int], list[int]]:
    """Accesses, hits and cold misses by phase of one cache, as the rules are written.

    A list from the least to the most recently used.  Room for a missing expert is made by the least recent one that is not of
    the call; where there is none the cache grows, and is cut before the next call (or, without `cut`, after its look-ups).
    """
    cache: list[int] = []
    seen: set[int] = set()
    accesses, hits, cold = [0, 0], [0, 0], [0, 0]
    for phase, rows in calls:
        if cut:
            cache = cache[len(cache) - slots :] if len(cache) > slots else cache
        call = {e for row in rows for e in row}
        accesses[phase] += len(call)
        hits[phase] += len(call & set(cache))
        cold[phase] += len(call - seen)
        seen |= call
        for e in [e for row in rows for e in row]:
            if e in cache:
                cache.remove(e)
            cache.append(e)
            others = [x for x in cache if x not in call]
            while len(cache) > slots and others:
                cache.remove(others.pop(0))
    return accesses, hits, cold


@st.composite
def random_calls(draw: st.DrawFn) -> tuple[Calls, int]:
    n_expert = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, min(4, n_expert)))
    row = st.lists(st.integers(0, n_expert - 1), min_size=top_k, max_size=top_k)  # an id may come twice
    call = st.tuples(st.sampled_from([PROMPT, DECODE]), st.lists(row, min_size=1, max_size=4))
    return draw(st.lists(call, max_size=25)), n_expert


@pytest.mark.parametrize("cut", [True, False])
@given(drawn=random_calls())
@settings(max_examples=300)
def test_the_curve_equals_a_replay_at_every_capacity(cut: bool, drawn: tuple[Calls, int]) -> None:
    calls, n_expert = drawn
    curves = lru_curves(layer_of(calls, n_expert), cut=cut)
    for slots in range(1, n_expert + 1):
        accesses, hits, cold = replay(calls, slots, cut=cut)
        assert [c.accesses for c in curves] == accesses
        assert [c.cold_misses for c in curves] == cold
        assert [int(c.hits[slots]) for c in curves] == hits
    assert [int(c.hits[0]) for c in curves] == [0, 0]
    assert [len(c.hits) for c in curves] == [n_expert + 1] * 2


def test_an_expert_of_a_call_does_not_push_out_another_of_it() -> None:
    decode = lru_curves(layer_of([(DECODE, [[0, 1]]), (DECODE, [[2, 0]]), (DECODE, [[1, 0]])], 3))[1]
    # Slot by slot, 2 would push out 0 before 0 is looked up.  At two slots the second call hits 0, the third 0 again.
    assert decode.hits.tolist() == [0, 1, 2, 3]
    assert (decode.accesses, decode.cold_misses) == (6, 3)


def test_a_call_larger_than_the_cache_is_cut_to_its_most_recent() -> None:
    calls: Calls = [(PROMPT, [[0, 1], [2, 3], [0, 1]]), (DECODE, [[1, 2]])]
    cut, whole = (lru_curves(layer_of(calls, 4), cut=c)[1].hits.tolist() for c in (True, False))
    assert cut == [0, 1, 1, 1, 2], "the stack after the prompt is 1, 0, 3, 2"
    assert whole == [0, 2, 2, 2, 2], "all four stay for one more call"


def test_a_cycle_over_more_experts_than_slots_hits_nothing() -> None:
    """What an LRU is known for: 4 experts one after the other, 3 slots."""
    decode = lru_curves(layer_of([(DECODE, [[i % 4]]) for i in range(40)], 4))[1]
    assert decode.hits.tolist() == [0, 0, 0, 0, 36]


def test_no_calls_no_hits() -> None:
    assert [(c.accesses, c.cold_misses, c.hits.tolist()) for c in lru_curves(layer_of([], 3))] == [(0, 0, [0] * 4)] * 2


def test_the_highest_id_of_sixteen_bits() -> None:
    decode = lru_curves(layer_of([(DECODE, [[65535]]), (DECODE, [[65535]])], 65536))[1]
    assert (int(decode.hits[1]), decode.cold_misses) == (1, 1)
