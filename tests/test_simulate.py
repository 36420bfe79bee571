"""The simulator: equal to plain replays, and worked out by hand."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.trace import DECODE
from bel.formats.trace_calls import read_trace
from bel.formats.trace_header import TraceLayer
from bel.profiler.clock import make_clock
from bel.profiler.curves import lru_curves
from bel.profiler.outcomes import Outcome, Setup, outcome, shared_set
from bel.profiler.simulate import BELADY, LRU, ORACLE, Policy, Row, knees, rows_json, simulate
from bel.profiler.slot_budgets import Budget, SharedBudget
from bel.profiler.work import Work, count_work
from replays import mixed_calls, replay_lru, replay_set
from simulated import LAYERS, PHASES, ROW_KEYS, Calls, steps, trace_of


@settings(max_examples=60)
@given(st.lists(mixed_calls(), min_size=1, max_size=3), st.sampled_from(sorted(PHASES)))
def test_lru_is_a_replay_of_each_run_and_layer(runs: list[Calls], phase: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        traces = [read_trace(trace_of(Path(folder, f"{i}"), calls)) for i, calls in enumerate(runs)]
    work = count_work(traces, LAYERS, phase)
    budgets = [Budget((a, b)) for a in range(6) for b in range(5)]
    for row, budget in zip(simulate(work, [Policy(LRU)], budgets, {}), budgets, strict=True):
        parts = [replay_lru(calls, at, budget.slots[at], PHASES[phase]) for calls in runs for at in (0, 1)]
        assert (row.accesses, row.hits, row.found.cold) == tuple(map(sum, zip(*parts, strict=True)))
        assert row.slots_by_layer == dict(zip((3, 7), budget.slots, strict=True))
    tokens = [max(sum(len(rows) for p, at, rows in c if at == x and p in PHASES[phase]) for x in (0, 1)) for c in runs]
    assert work.tokens == sum(tokens)


@settings(max_examples=60)
@given(mixed_calls(), st.sampled_from(sorted(PHASES)))
def test_the_oracle_is_the_best_of_all_sets_and_belady_the_bound_of_lru(calls: Calls, phase: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = read_trace(trace_of(Path(folder, "x"), calls))
    work = count_work([trace], LAYERS, phase)
    cold = sum(lru_curves(c)[p].cold_misses for c in trace.layers for p in PHASES[phase])
    for slots in range(6):
        budget = Budget((slots, min(slots, 4)))
        oracle, lru, best = simulate(work, [Policy(ORACLE), Policy(LRU), Policy(BELADY)], [budget], {})
        sets = [{e for e in range(5) if mask >> e & 1} for mask in range(32)]
        most = 0
        for place in (0, 1):
            fitting = [s for s in sets if len(s) == budget.slots[place] and max(s, default=0) < LAYERS[place].n_expert]
            most += max(replay_set(calls, place, s, PHASES[phase])[0] for s in fitting)
        assert oracle.hits == most
        assert lru.hits <= best.hits <= best.accesses - cold
        assert lru.found.cold == best.found.cold == cold
        assert oracle.found.cold <= min(oracle.misses, cold)


def test_regret_by_hand() -> None:
    """One slot of two experts, used 0 0 0 0 1 1: Belady and LRU 4 of 6, a set drawn at random 3, the set {1} 2."""
    with tempfile.TemporaryDirectory() as folder:
        one = (TraceLayer(0, 2, 1, 100),)
        trace = read_trace(trace_of(Path(folder, "x"), steps([0], [0], [0], [0], [1], [1]), one))
    work = count_work([trace], one, "decode")
    empty, half, full = (Budget((n,)) for n in (0, 1, 2))
    rows = simulate(work, [Policy(BELADY), Policy(LRU), Policy(ORACLE)], [half], {})
    assert [(r.hits, r.found.cold, r.regret) for r in rows] == [(4, 2, 0.0), (4, 2, 0.0), (4, 1, 0.0)]
    assert [r.per_token(r.found.nvme_bytes) for r in rows] == [200 / 6] * 3
    assert [r.slots_bytes for r in rows] == [100] * 3
    (nothing,) = simulate(work, [Policy(LRU)], [empty], {})
    assert (nothing.hits, nothing.misses, nothing.found.cold, nothing.regret) == (0, 6, 2, None)
    # The random set of all experts is loaded beforehand and has more hits than Belady, whose cache starts empty.
    best, whole = simulate(work, [Policy(BELADY), Policy(ORACLE)], [full], {})
    assert (best.hits, best.regret, whole.hits, whole.found.cold, whole.regret) == (4, None, 6, 0, None)


def test_rows_are_json_without_a_command() -> None:
    row = Row("lru", "layer", "decode", {0: 1}, 10, 4, 8, Outcome(2, 1, 0, 60), 0.5)
    (got,) = rows_json([row])
    assert list(got) == ROW_KEYS
    assert (got["misses"], got["hit_rate"], got["bytes_per_token"]["nvme"]) == (6, 0.25, 15.0)


@settings(max_examples=40)
@given(st.lists(mixed_calls(), min_size=1, max_size=2), st.sampled_from(sorted(PHASES)), st.integers(0, 5), st.integers(0, 4))
def test_passes_for_all_capacities_agree_with_the_replay(runs: list[Calls], phase: str, a: int, b: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        traces = [read_trace(trace_of(Path(folder, f"{i}"), calls)) for i, calls in enumerate(runs)]
    work = count_work(traces, LAYERS, phase)
    free = Setup(clock=make_clock("blocking", [0.0, 0.0], 1.0))
    wanted = [np.arange(5, 0, -1.0), np.array([0.0, 2.0, 1.0, 0.0])]
    for policy, ranks in ((Policy(LRU), None), (Policy(BELADY), None), (Policy(ORACLE), wanted)):
        fast = outcome(work, policy.cache, ranks, Budget((a, b)), Setup())
        slow = outcome(work, policy.cache, ranks, Budget((a, b)), free)
        parts = [(x.hits, x.cold, x.uploads, x.nvme_bytes) for x in (fast, slow)]
        assert parts[0] == parts[1]
        assert slow.seconds == sum(c.accesses for c in work.counts) - slow.hits, "a second for each miss"


def test_a_set_for_all_layers_takes_the_most_uses_per_byte() -> None:
    layers = (TraceLayer(0, 2, 1, 10), TraceLayer(1, 2, 1, 4))
    wanted = [np.array([30.0, 9.0]), np.array([8.0, 1.0])]
    assert shared_set(wanted, layers, 14) == [0, 2]
    assert shared_set(wanted, layers, 13) == [0]
    assert shared_set(wanted, layers, 9) == [2, 3], "what does not fit is passed over"
    assert shared_set(wanted, layers, 100) == [0, 2, 1, 3]


def test_knees_are_the_smallest_budgets_that_are_nearly_best() -> None:
    def row(policy: str, slots: int, hits: int, accesses: int = 100) -> Row:
        return Row(policy, "layer", "decode", {0: slots}, None, 10, accesses, Outcome(hits, 0, 0, None), None)

    rows = [row("a", 3, 100), row("a", 2, 90), row("a", 1, 89), row("b", 1, 0), row("b", 2, 0), row("c", 1, 0, 0)]
    assert {name: r.size for name, r in knees(rows).items()} == {"a": 2}, "nothing was hit by b, and of c nothing asked"
    assert knees([row("a", 3, 100), row("a", 3, 90)]) == {}, "one size is no curve"


def test_a_shared_budget_serves_the_layers_in_the_order_of_the_run() -> None:
    """With room for one expert, layer 7 pushes out what layer 3 uses, and is pushed out."""
    with tempfile.TemporaryDirectory() as folder:
        calls: Calls = [(DECODE, 1, [[0]]), (DECODE, 1, [[0]]), (DECODE, 0, [[0]]), (DECODE, 1, [[0]])]
        layers = (TraceLayer(3, 2, 1, 10), TraceLayer(7, 2, 1, 10))
        work: Work = count_work([read_trace(trace_of(Path(folder, "x"), calls, layers))], layers, "decode")
    (row,) = simulate(work, [Policy(LRU)], [SharedBudget(10)], {})
    assert (row.hits, row.misses, row.found.cold, row.found.nvme_bytes) == (1, 3, 2, 30)
