"""Belady's bound against every possible cache, and against LRU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.trace import DECODE, PROMPT
from bel.profiler.belady import belady_hits
from bel.profiler.curves import lru_curves
from routes import layer_calls

N_EXPERT = 5
Calls = list[tuple[int, list[tuple[int, ...]]]]  # (phase, rows of ids)


def most_hits(calls: Calls, slots: int, phases: tuple[int, ...]) -> int:
    """Try every cache that a policy may choose after every call."""
    states = {frozenset[int](): 0}
    for phase, group in calls:
        used = frozenset(e for row in group for e in row)
        after: dict[frozenset[int], int] = {}
        for state, hits in states.items():
            total = hits + (len(state & used) if phase in phases else 0)
            if len(used) >= slots:
                kept = [frozenset(c) for c in itertools.combinations(used, slots)]
            else:
                others = state - used
                sizes = range(min(slots - len(used), len(others)) + 1)
                kept = [used | frozenset(c) for n in sizes for c in itertools.combinations(others, n)]
            for cache in kept:
                after[cache] = max(after.get(cache, -1), total)
        states = after
    return max(states.values())


rows = st.permutations(range(N_EXPERT)).map(lambda p: tuple(p[:2]))
some_calls = st.lists(
    st.tuples(st.sampled_from([PROMPT, DECODE]), st.lists(rows, min_size=1, max_size=3)), min_size=1, max_size=9
)


@settings(max_examples=150)
@given(some_calls, st.sampled_from([(PROMPT,), (DECODE,), (PROMPT, DECODE)]))
def test_no_cache_has_more_hits_and_one_has_as_many(calls: Calls, phases: tuple[int, ...]) -> None:
    hits = belady_hits(layer_calls(calls, N_EXPERT, 2), phases)
    assert hits.tolist() == [most_hits(calls, slots, phases) for slots in range(N_EXPERT + 1)]


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(6, 40))
def test_lru_never_beats_it(seed: int, top_k: int, n_expert: int) -> None:
    random = np.random.default_rng(seed)
    popularity = random.dirichlet(np.full(n_expert, 0.3)) + 1e-9
    picks = [tuple(random.choice(n_expert, top_k, False, popularity / popularity.sum())) for _ in range(200)]
    calls = layer_calls([(PROMPT, picks[:50]), *((DECODE, [p]) for p in picks[50:])], n_expert, top_k)
    lru = lru_curves(calls)
    for phases in ((PROMPT,), (DECODE,), (PROMPT, DECODE)):
        best = belady_hits(calls, phases)
        assert (best >= sum(lru[p].hits for p in phases)).all()
        assert best[-1] == sum(lru[p].accesses - lru[p].cold_misses for p in phases)  # with room for all, only cold ones miss


def test_a_loop_that_defeats_lru() -> None:
    calls = layer_calls([(DECODE, [(e,)]) for e in [0, 1, 2] * 20], 3, 1)
    assert lru_curves(calls)[DECODE].hits.tolist() == [0, 0, 0, 57]
    assert belady_hits(calls).tolist() == [0, 0, 29, 57]  # of the 57, every second one with two slots


@pytest.mark.parametrize("phases", [(PROMPT,), (DECODE,), (PROMPT, DECODE)])
def test_a_layer_without_calls(phases: tuple[int, ...]) -> None:
    assert belady_hits(layer_calls([], N_EXPERT, 2), phases).tolist() == [0] * (N_EXPERT + 1)
