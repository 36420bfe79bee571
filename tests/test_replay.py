"""Replay of recorded runs: equal to slow models and to the passes for all capacities, and never better than Belady."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.trace import DECODE, PROMPT
from bel.formats.trace_calls import LayerCalls
from bel.formats.trace_header import TraceLayer
from bel.profiler.belady import belady_hits
from bel.profiler.curves import lru_curves
from bel.profiler.replay import BELADY_POLICY, Replayed, Stream, global_stream, layer_stream, next_uses, replay
from bel.runtime.policies import Policy, parse_policy
from cache_model import ModelCache
from routes import draw_rows, layer_calls

N_EXPERT = 6
LOADERS = ("lru", "random", "lfu-forget", "lfu-ghost", "lfu-decay:0.9", "lfuda", "slru", "arc", "s3fifo")
"""The policies that load what a call misses, and nothing else: those that Belady bounds."""
EMPTY_STARTERS = (*LOADERS, "repick:3")
Calls = list[tuple[int, list[tuple[int, ...]]]]

one_row = st.permutations(range(N_EXPERT)).map(lambda p: tuple(p[:2]))
layer_of_calls = st.lists(
    st.tuples(st.sampled_from([PROMPT, DECODE]), st.lists(one_row, min_size=1, max_size=4)), min_size=1, max_size=14
)
phases_of = st.sampled_from([(PROMPT,), (DECODE,), (PROMPT, DECODE)])


def stream_of(calls: Calls, phases: tuple[int, ...]) -> Stream:
    own = layer_calls(calls, N_EXPERT, 2)
    return layer_stream(own, np.isin(own.phase, phases))


def hits(stream: Stream, done: Replayed) -> int:
    return int((done.distinct - done.misses)[stream.counted].sum())


def serve(policy: Policy, stream: Stream, slots: int, *, keep_whole: bool = False) -> int:
    return hits(stream, replay(policy, stream, np.ones(stream.n_items, np.int64), slots, keep_whole=keep_whole))


@settings(max_examples=60)
@given(layer_of_calls, phases_of, st.booleans())
def test_lru_has_the_hits_of_its_curve_at_every_capacity(calls: Calls, phases: tuple[int, ...], cut: bool) -> None:
    stream = stream_of(calls, phases)
    curves = lru_curves(layer_calls(calls, N_EXPERT, 2), cut=cut)
    want = np.sum([curves[p].hits for p in phases], axis=0)
    # A curve says nothing of what a cache of no slots keeps of a call that stays whole.
    for slots in range(0 if cut else 1, N_EXPERT + 1):
        assert serve(parse_policy("lru"), stream, slots, keep_whole=not cut) == want[slots], slots


@settings(max_examples=40)
@given(layer_of_calls, phases_of)
def test_belady_has_the_hits_of_its_pass_and_nobody_has_more(calls: Calls, phases: tuple[int, ...]) -> None:
    stream = stream_of(calls, phases)
    best = belady_hits(layer_calls(calls, N_EXPERT, 2), phases)
    for slots in range(N_EXPERT + 1):
        assert serve(BELADY_POLICY, stream, slots) == best[slots]
        for name in LOADERS:
            assert serve(parse_policy(name), stream, slots) <= best[slots], (name, slots)


@settings(max_examples=60)
@given(layer_of_calls, st.integers(1, 4))
def test_a_chosen_set_beats_belady_only_by_what_it_does_not_load(calls: Calls, period: int) -> None:
    """Misses pass a set by, as if they had slots of their own, and what it uploads would have been misses."""
    stream = stream_of(calls, (PROMPT, DECODE))
    best = belady_hits(layer_calls(calls, N_EXPERT, 2))
    for slots in range(N_EXPERT + 1):
        done = replay(parse_policy(f"repick:{period}"), stream, np.ones(N_EXPERT, np.int64), slots)
        room = min(slots + int(done.distinct.max()), N_EXPERT)
        assert hits(stream, done) - int(done.uploads.sum()) <= best[room]


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(8, 40))
def test_nobody_beats_belady_on_long_runs(seed: int, top_k: int, n_expert: int) -> None:
    rows = draw_rows(np.random.default_rng(seed), 120, n_expert, top_k).tolist()
    own = layer_calls([(PROMPT, rows[:20]), *((DECODE, [row]) for row in rows[20:])], n_expert, top_k)
    stream = layer_stream(own, own.phase == DECODE)
    best = belady_hits(own, (DECODE,))
    for slots in {0, 1, top_k, n_expert // 2, n_expert - 1, n_expert}:
        for name in LOADERS:
            assert serve(parse_policy(name), stream, slots) <= best[slots], (name, slots)


@pytest.mark.parametrize("name", [*EMPTY_STARTERS, "static"])
def test_extreme_sizes(name: str) -> None:
    """No slots hit nothing; with room for all only first uses miss."""
    rows = draw_rows(np.random.default_rng(2), 200, 16, 3).tolist()
    own = layer_calls([(DECODE, [row]) for row in rows], 16, 3)
    stream = layer_stream(own, np.ones(200, np.bool_))
    ones = np.ones(16, np.int64)
    nothing = replay(parse_policy(name), stream, ones, 0)
    assert nothing.misses.tolist() == nothing.distinct.tolist() == [3] * 200
    whole = replay(parse_policy(name), stream, ones, 16, preloaded=range(16) if name == "static" else ())
    used = len(np.unique(own.ids))
    assert int(nothing.cold.sum()) == used
    assert (int(whole.misses.sum()), int(whole.cold.sum())) == ((0, 0) if name == "static" else (used, used))
    assert int(whole.uploads.sum()) == 0


def test_what_was_preloaded_and_lost_is_no_cold_miss_once_used() -> None:
    own = layer_calls([(DECODE, [(e,)]) for e in (0, 1, 2, 0, 3)], 4, 1)
    stream = layer_stream(own, np.ones(5, np.bool_))
    done = replay(parse_policy("lru"), stream, np.ones(4, np.int64), 1, preloaded=[0])
    assert (done.misses.tolist(), done.cold.tolist()) == ([0, 1, 1, 1, 1], [0, 1, 1, 0, 1])


LAYERS = (TraceLayer(0, 5, 2, 7), TraceLayer(1, 4, 1, 3), TraceLayer(4, 5, 3, 5))
BASES = (0, 5, 9)
Run = list[tuple[int, list[list[int]], bool]]  # (place, rows, counted) in the order of the run


@st.composite
def some_runs(draw: st.DrawFn) -> Run:
    calls = []
    for place in draw(st.lists(st.integers(0, 2), min_size=1, max_size=25)):
        row = st.permutations(range(LAYERS[place].n_expert)).map(lambda p, k=LAYERS[place].top_k: p[:k])
        calls.append((place, draw(st.lists(row, min_size=1, max_size=3)), draw(st.booleans())))
    return calls


def layers_of(run: Run) -> tuple[list[LayerCalls], list[np.ndarray]]:
    layers, counted = [], []
    for place, info in enumerate(LAYERS):
        mine = [(order, rows, is_counted) for order, (at, rows, is_counted) in enumerate(run) if at == place]
        starts = np.cumsum([0, *(len(rows) for _, rows, _ in mine)]).astype(np.int64)
        ids = np.array([row for _, rows, _ in mine for row in rows], np.uint16).reshape(-1, info.top_k)
        order = np.array([o for o, _, _ in mine], np.int64)
        layers.append(
            LayerCalls(info, order, np.ones(len(mine), np.uint8), order, starts, np.arange(len(ids)), ids, None, None)
        )
        counted.append(np.array([c for _, _, c in mine], np.bool_))
    return layers, counted


def sizes_of(unit: bool) -> list[int]:
    return [1 if unit else x.expert_bytes or 0 for x in LAYERS for _ in range(x.n_expert)]


@pytest.mark.parametrize("name", [*EMPTY_STARTERS, "static"])
@settings(max_examples=25)
@given(some_runs(), st.integers(0, 80), st.booleans(), st.lists(st.integers(0, 13), max_size=5))
def test_one_cache_for_all_layers(name: str, run: Run, capacity: int, keep_whole: bool, first: list[int]) -> None:
    layers, counted = layers_of(run)
    stream = global_stream(layers, counted)
    assert stream.counted.tolist() == [c for _, _, c in run]
    assert stream.place.tolist() == [place for place, _, _ in run]
    sizes, policy = sizes_of(unit=False), parse_policy(name)
    done = replay(policy, stream, np.array(sizes), capacity, keep_whole=keep_whole, preloaded=first)
    model = ModelCache(name.partition(":")[0], sizes, capacity, policy.decay, policy.period_tokens, keep_whole)
    model.preload(first)
    busiest = int(np.argmax([len(x.ids) for x in layers]))
    seen: set[int] = set()
    for c, (place, rows, _) in enumerate(run):
        want = model.call([[BASES[place] + e for e in row] for row in rows], ticks=place == busiest)
        assert (done.distinct[c], done.misses[c]) == (len(want.own), len(want.missed))
        assert done.cold[c] == len(set(want.missed) - seen)
        assert (done.uploads[c], done.uploaded[c]) == (len(want.uploads), model.size(want.uploads))
        seen |= set(want.own)


@settings(max_examples=100)
@given(some_runs(), st.integers(0, 80), st.booleans())
def test_belady_for_all_layers_looks_for_the_farthest_counted_use(run: Run, capacity: int, unit: bool) -> None:
    layers, counted = layers_of(run)
    stream = global_stream(layers, counted)
    sizes = sizes_of(unit)
    done = replay(BELADY_POLICY, stream, np.array(sizes), capacity)
    assert done.misses.tolist() == _plain_belady(run, sizes, capacity)


def _plain_belady(run: Run, sizes: Sequence[int], capacity: int) -> list[int]:
    calls = [[BASES[place] + e for row in rows for e in row] for place, rows, _ in run]

    def next_use(item: int, after: int) -> int:
        later = next((c for c in range(after + 1, len(calls)) if item in calls[c]), len(calls))
        return later if later < len(calls) and run[later][2] else len(calls)

    held: set[int] = set()
    used: dict[int, int] = {}
    misses, clock = [], 0
    for c, items in enumerate(calls):
        misses.append(len(set(items) - held))
        held |= set(items)
        for item in items:
            clock += 1
            used[item] = clock
        for spared in (set(items), set[int]()):
            while sum(sizes[i] for i in held) > capacity and held - spared:
                held.remove(min(held - spared, key=lambda i: (-next_use(i, c), used[i])))
    return misses


@settings(max_examples=40)
@given(some_runs())
def test_next_uses(run: Run) -> None:
    layers, counted = layers_of(run)
    stream = global_stream(layers, counted)
    calls = [{BASES[place] + e for row in rows for e in row} for place, rows, _ in run]
    found = next_uses(stream)
    for c in range(len(run)):
        for i in range(stream.id_start[c], stream.id_start[c + 1]):
            item = stream.base[c] + stream.ids[i]
            later = next((n for n in range(c + 1, len(run)) if item in calls[n]), len(run))
            assert found[i] == (later if later < len(run) and run[later][2] else len(run))


def test_a_global_lru_below_a_token_cycle_hits_nothing() -> None:
    """Each layer uses the same experts in every token, and the other layers push them out in between."""
    run: Run = [(place, [list(range(x.top_k))], True) for _ in range(20) for place, x in enumerate(LAYERS)]
    stream = global_stream(*layers_of(run))
    cycle = sum(x.top_k * (x.expert_bytes or 0) for x in LAYERS)
    sizes = np.array(sizes_of(unit=False))
    largest_rest = max((x.top_k - 1) * (x.expert_bytes or 0) for x in LAYERS)
    assert hits(stream, replay(parse_policy("lru"), stream, sizes, cycle - largest_rest - 1)) == 0
    assert hits(stream, replay(parse_policy("lru"), stream, sizes, cycle)) == 19 * 6
