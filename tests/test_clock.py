"""The clock: equal to a queue written out step by step, and to closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bel.profiler.clock import ARRIVAL, BLOCKING, DEMAND, KINDS, layer_stall, make_clock, price

TIMES = st.lists(st.integers(0, 9), min_size=1, max_size=6)  # whole seconds, so that sums are exact


@st.composite
def priced(draw: st.DrawFn) -> tuple[list[int], list[int], np.ndarray]:
    layer = draw(TIMES)
    fetch = draw(st.lists(st.integers(0, 9), min_size=len(layer), max_size=len(layer)))
    row = st.lists(st.integers(0, 5), min_size=len(layer), max_size=len(layer))
    return layer, fetch, np.array(draw(st.lists(row, min_size=1, max_size=5)), np.int32)


@given(priced())
def test_arrival_is_one_queue_that_layers_wait_for(drawn: tuple[list[int], list[int], np.ndarray]) -> None:
    layer, fetch, misses = drawn
    times = price(make_clock(ARRIVAL, layer, fetch), misses)
    for t, row in enumerate(misses.tolist()):
        finished = list(np.cumsum([n * f for n, f in zip(row, fetch, strict=True)]))  # one after the other, from the start
        now = 0
        for i, seconds in enumerate(layer):
            now = max(now, int(finished[i])) + seconds
        assert times.seconds[t] == now
        assert times.compute_s[t] == sum(layer)
        assert times.transfer_s[t] == finished[-1]
    assert times.layer_stall_s.sum() == times.stall_s.sum()


@given(priced())
def test_demand_hides_behind_its_own_layer_and_blocking_behind_nothing(
    drawn: tuple[list[int], list[int], np.ndarray],
) -> None:
    layer, fetch, misses = drawn
    demand, blocking = make_clock(DEMAND, layer, fetch), make_clock(BLOCKING, layer, fetch)
    for t, row in enumerate(misses.tolist()):
        each = [max(0, n * f - s) for n, f, s in zip(row, fetch, layer, strict=True)]
        assert price(demand, misses).stall_s[t] == sum(each)
        assert price(blocking, misses).stall_s[t] == price(blocking, misses).transfer_s[t]
    assert layer_stall(demand, 0, 5).tolist() == [max(0, n * fetch[0] - layer[0]) for n in range(6)]


@given(priced())
def test_foretold_fetches_never_stall_longer_than_those_that_are_waited_for(
    drawn: tuple[list[int], list[int], np.ndarray],
) -> None:
    layer, fetch, misses = drawn
    stalls = {kind: price(make_clock(kind, layer, fetch), misses).stall_s for kind in KINDS}
    assert (stalls[ARRIVAL] <= stalls[BLOCKING]).all()
    assert (stalls[DEMAND] <= stalls[BLOCKING]).all()


@given(priced(), st.sampled_from(KINDS), st.integers(0, 4), st.integers(0, 5))
def test_a_miss_less_never_costs_time(drawn: tuple[list[int], list[int], np.ndarray], kind: str, step: int, place: int) -> None:
    layer, fetch, misses = drawn
    fewer = misses.copy()
    at = (step % misses.shape[0], place % misses.shape[1])
    fewer[at] = max(fewer[at] - 1, 0)
    clock = make_clock(kind, layer, fetch)
    assert (price(clock, fewer).seconds <= price(clock, misses).seconds).all()


def test_experts_on_the_cpu_run_beside_the_layer() -> None:
    clock = make_clock(BLOCKING, [3.0, 3.0], 1.0, 2.0)
    times = price(clock, np.array([[1, 0]], np.int32), np.array([[1, 4]], np.int32))
    assert times.compute_s.tolist() == [3.0 + 8.0]
    assert times.stall_s.tolist() == [1.0]


def test_the_stall_of_a_late_layer_shifts_nothing_before_it() -> None:
    times = price(make_clock(ARRIVAL, [1.0, 1.0, 1.0], 1.0), np.array([[0, 4, 0], [0, 0, 2]], np.int32))
    assert times.layer_stall_s.tolist() == [0.0, 3.0, 0.0]
    assert times.stall_s.tolist() == [3.0, 0.0]


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_times_that_cannot_be_are_refused(bad: float) -> None:
    for arguments in ([[bad], 1.0, 0.0], [[1.0], bad, 0.0], [[1.0], 1.0, bad]):
        with pytest.raises(ValueError, match="negative or not finite"):
            make_clock(ARRIVAL, *arguments)
    with pytest.raises(ValueError, match="not one of the clocks"):
        make_clock("wall", [1.0], 1.0)
    with pytest.raises(ValueError, match="2 layers"):
        price(make_clock(ARRIVAL, [1.0], 1.0), np.zeros((1, 2), np.int32))
    with pytest.raises(ValueError, match="depends on the others"):
        layer_stall(make_clock(ARRIVAL, [1.0], 1.0), 0, 1)
