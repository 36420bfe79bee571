"""Static sets: in-sample optimal, held out without a look at what they serve, and random ones exact."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.trace import DECODE, PROMPT
from bel.formats.trace_calls import LayerCalls
from bel.profiler.static_sets import (
    BY_PROMPT,
    BY_RUN,
    BY_TOKEN,
    NOT_COUNTED,
    equal_mix,
    fold_counts,
    held_out_hits,
    random_hits,
    split_calls,
    static_hits,
    transfer,
)
from routes import Call, draw_rows, layer_calls

BOTH = (PROMPT, DECODE)
counts = st.lists(st.integers(0, 20), min_size=5, max_size=5).map(lambda c: np.array(c, np.int64))


@given(counts)
def test_the_set_of_the_most_used_is_the_best_of_all_sets(used: npt.NDArray[np.int64]) -> None:
    best = [max(sum(used[list(c)]) for c in itertools.combinations(range(5), n)) for n in range(6)]
    assert static_hits(used, used).tolist() == best


@given(counts)
def test_a_random_set_hits_what_all_sets_of_its_size_hit_in_the_mean(used: npt.NDArray[np.int64]) -> None:
    mean = [np.mean([sum(used[list(c)]) for c in itertools.combinations(range(5), n)]) for n in range(6)]
    assert random_hits(int(used.sum()), 5) == pytest.approx(mean)


@given(counts, counts)
def test_held_out_sets_are_made_of_the_other_part(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> None:
    hits = held_out_hits(np.stack([one, other]))
    if not one.any() or not other.any():
        assert hits is None
        return
    want = []
    for size in range(6):
        first = sorted(range(5), key=lambda e: (-one[e], e))[:size]
        second = sorted(range(5), key=lambda e: (-other[e], e))[:size]
        want.append(sum(other[first]) + sum(one[second]))
    assert hits is not None
    assert hits.tolist() == want
    assert (hits <= static_hits(one, one) + static_hits(other, other)).all()


def test_held_out_is_random_where_usage_has_no_pattern() -> None:
    random = np.random.default_rng(3)
    hits = held_out_hits(random.multinomial(200_000, np.full(64, 1 / 64), size=2))
    assert hits is not None
    assert hits[32] / 400_000 == pytest.approx(0.5, abs=0.01)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.lists(st.tuples(st.sampled_from(BOTH), st.integers(1, 4)), max_size=12))
def test_accesses_are_the_distinct_experts_of_a_call(seed: int, shape: list[tuple[int, int]]) -> None:
    random = np.random.default_rng(seed)
    calls: list[Call] = [(phase, draw_rows(random, n, 6, 2).tolist()) for phase, n in shape]
    folds = random.integers(NOT_COUNTED, 2, len(calls)).astype(np.int8)
    want = np.zeros((2, 6), int)
    for (_, rows), fold in zip(calls, folds, strict=True):
        if fold >= 0:
            want[fold, list({e for row in rows for e in row})] += 1
    assert fold_counts(layer_calls(calls, 6, 2), folds).tolist() == want.tolist()


def run_of(*prompts: tuple[int, int]) -> LayerCalls:
    """Prompts of (prompt tokens in one call, decode tokens)."""
    calls: list[Call] = []
    token: list[int] = []
    for prompt, decode in prompts:
        calls += [(PROMPT, [[0]] * prompt)] * bool(prompt) + [(DECODE, [[0]])] * decode
        token += range(prompt + decode)
    return layer_calls(calls, 4, 1, token=token)


def test_several_runs_are_split_between_runs() -> None:
    split = split_calls([run_of((5, 10)), run_of((5, 10), (2, 3)), run_of((5, 20))], [DECODE])
    assert split.kind == BY_RUN
    assert [set(f.tolist()) for f in split.folds] == [{-1, 0}, {-1, 0}, {-1, 1}]


def test_one_run_of_several_prompts_is_split_between_prompts() -> None:
    split = split_calls([run_of((5, 10), (5, 4), (5, 12))], [DECODE])
    assert split.kind == BY_PROMPT
    assert split.folds[0].tolist() == [-1, *[0] * 10, -1, *[0] * 4, -1, *[1] * 12]


def test_a_single_prompt_is_split_into_token_halves() -> None:
    split = split_calls([run_of((5, 9))], [DECODE])
    assert split.kind == BY_TOKEN
    assert split.folds[0].tolist() in ([-1, *[0] * 4, *[1] * 5], [-1, *[0] * 5, *[1] * 4])


def test_a_run_without_counted_rows_does_not_make_a_split_between_runs() -> None:
    assert split_calls([run_of((5, 0)), run_of((5, 9))], [DECODE]).kind == BY_TOKEN


def test_a_single_call_is_in_the_first_part_whole() -> None:
    split = split_calls([run_of((7, 0))], BOTH)
    assert (split.kind, [f.tolist() for f in split.folds]) == (BY_TOKEN, [[0]])


def test_nothing_counts_in_a_run_without_calls() -> None:
    assert [f.tolist() for f in split_calls([run_of()], BOTH).folds] == [[]]


@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=4), min_size=1, max_size=4))
def test_a_split_counts_every_call_of_the_phase_once_and_the_second_part_comes_later(runs: list[list[tuple[int, int]]]) -> None:
    made = [run_of(*prompts) for prompts in runs]
    for phases in ((PROMPT,), (DECODE,), BOTH):
        split = split_calls(made, phases)
        folds = np.concatenate(split.folds)
        phase = np.concatenate([c.phase for c in made])
        assert ((folds == NOT_COUNTED) == ~np.isin(phase, phases)).all()
        counted = folds[folds != NOT_COUNTED]
        assert (np.diff(counted) >= 0).all()
        assert len(set(counted.tolist())) == 2 or len(counted) < 2


def test_a_merge_weights_workloads_equally_whatever_their_length() -> None:
    mix = equal_mix([np.array([100, 0, 0]), np.array([0, 1, 1]), np.zeros(3, np.int64)])
    assert mix.tolist() == [0.5, 0.25, 0.25]
    assert equal_mix([np.zeros(3, np.int64)]).tolist() == [0, 0, 0]


def test_transfer_of_two_workloads_with_nothing_in_common() -> None:
    code = [np.array([[10, 0, 0, 0], [0, 10, 0, 0]])]
    chat = [np.array([[0, 0, 4, 4], [0, 0, 4, 4]])]
    found = transfer([code, chat], [2], held_out=False)
    assert found.hit_rates == ((1.0, 0.0), (0.0, 1.0))
    assert found.merged == (1.0, 0.0)  # each expert of code has a half of it, and of chat too: the lower ids win
    assert (found.regrets, found.worst_regret) == ((0.0, 1.0), 1.0)


def test_transfer_held_out_looks_at_the_other_part_only() -> None:
    code = [np.array([[10, 0, 0, 0], [0, 10, 0, 0]])]
    found = transfer([code, code], [1], held_out=True)
    assert found.hit_rates == ((0.0, 0.0), (0.0, 0.0))
    assert found.worst_regret == 0


def test_a_workload_without_accesses_has_no_rate() -> None:
    none = [np.zeros((2, 4), np.int64)]
    found = transfer([[np.array([[1, 2, 3, 4], [1, 2, 3, 4]])], none], [2], held_out=False)
    assert found.hit_rates == ((0.7, None), (0.3, None))
    assert found.regrets == (0.0, None)
