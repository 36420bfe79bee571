"""The planner: the dynamic programme within one expert, never worse than uniform slots, never worse for more bytes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.plan import Prediction
from bel.formats.trace_header import TraceLayer
from bel.profiler.clock import ARRIVAL, BLOCKING, DEMAND, KINDS, Clock, make_clock, price
from bel.profiler.decode_steps import Steps
from bel.profiler.demand import Demand
from bel.profiler.hulls import Room, along, along_and_fill, even_path, hull_path, lower_hull
from bel.profiler.miss_tables import miss_table
from bel.profiler.planner import Planner, Share, mean_prediction, predict, predict_random, stall_seconds

Curve = npt.NDArray[np.float64]


@st.composite
def shares(draw: st.DrawFn, *, concave: bool, one_size: bool = False) -> tuple[Room, list[Curve], int]:
    """Layers with curves that fall by whole numbers, and a budget in bytes."""
    room_rows, curves = [], []
    size = st.just(3) if one_size else st.integers(1, 5)
    for _ in range(draw(st.integers(1, 4))):
        drops = draw(st.lists(st.integers(0, 20), min_size=1, max_size=7))
        drops = sorted(drops, reverse=True) if concave else drops
        most = len(drops)
        room_rows.append((draw(st.integers(0, most)), most, draw(size)))
        curves.append(np.concatenate([[0.0], -np.cumsum(drops, dtype=np.float64)]) + sum(drops))
    floor, top, sizes = (np.array(column, np.int64) for column in zip(*room_rows, strict=True))
    room = Room(floor, top, sizes)
    return room, curves, draw(st.integers(room.floor_bytes, room.most_bytes))


def best_cost(room: Room, curves: list[Curve], budget: int) -> float:
    """The dynamic programme, byte by byte."""

    @cache
    def best(layer: int, left: int) -> float:
        if layer == len(curves):
            return 0.0
        size = int(room.slot_bytes[layer])
        slots = range(int(room.floor[layer]), int(room.most[layer]) + 1)
        rests = [(float(curves[layer][c]), left - c * size) for c in slots if c * size <= left]
        return min((cost + best(layer + 1, rest) for cost, rest in rests), default=float("inf"))

    return best(0, budget)


def cost_of(curves: list[Curve], slots: npt.NDArray[np.int64]) -> float:
    return float(sum(curve[c] for curve, c in zip(curves, slots, strict=True)))


def check_fits(room: Room, slots: npt.NDArray[np.int64], budget: int) -> None:
    assert (room.floor <= slots).all()
    assert (slots <= room.most).all()
    assert slots @ room.slot_bytes <= budget


@settings(max_examples=300)
@given(shares(concave=True))
def test_concave_curves_give_the_optimum_within_one_expert(drawn: tuple[Room, list[Curve], int]) -> None:
    room, curves, budget = drawn
    slots = along_and_fill(hull_path(room, [curves]), room, budget, curves)
    check_fits(room, slots, budget)
    assert cost_of(curves, slots) >= best_cost(room, curves, budget)
    less = max(budget - int(room.slot_bytes.max()), room.floor_bytes)
    assert cost_of(curves, slots) <= best_cost(room, curves, less)


@settings(max_examples=300)
@given(shares(concave=True, one_size=True))
def test_concave_curves_of_one_size_give_the_optimum(drawn: tuple[Room, list[Curve], int]) -> None:
    room, curves, budget = drawn
    slots = along_and_fill(hull_path(room, [curves]), room, budget, curves)
    assert cost_of(curves, slots) == best_cost(room, curves, budget)


@settings(max_examples=300)
@given(shares(concave=False))
def test_other_curves_are_within_one_step_of_a_hull(drawn: tuple[Room, list[Curve], int]) -> None:
    room, curves, budget = drawn
    path = hull_path(room, [curves])
    slots = along_and_fill(path, room, budget, curves)
    check_fits(room, slots, budget)
    assert cost_of(curves, slots) >= best_cost(room, curves, budget)
    less = max(budget - int(path.bytes.max(initial=0)), room.floor_bytes)
    assert cost_of(curves, slots) <= best_cost(room, curves, less)
    assert cost_of(curves, slots) <= cost_of(curves, along(path, room, budget))


@settings(max_examples=200)
@given(shares(concave=False), st.integers(0, 40))
def test_more_bytes_never_cost_more(drawn: tuple[Room, list[Curve], int], more: int) -> None:
    room, curves, budget = drawn
    path = hull_path(room, [curves])
    richer = min(budget + more, room.most_bytes)
    for share in (along, lambda *a: along_and_fill(*a, curves)):
        assert cost_of(curves, share(path, room, richer)) <= cost_of(curves, share(path, room, budget))
    assert (along(path, room, richer) >= along(path, room, budget)).all()
    assert (along(even_path(room), room, richer) >= along(even_path(room), room, budget)).all()


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12))
def test_the_hull_lies_below_and_is_convex(values: list[int]) -> None:
    curve = np.array(values, np.float64)
    corners = lower_hull(curve)
    assert (corners[0], corners[-1]) == (0, len(values) - 1)
    assert (np.interp(np.arange(len(values)), corners, curve[corners]) <= curve + 1e-9).all()
    assert (np.diff(np.diff(curve[corners]) / np.diff(corners)) >= -1e-9).all()


def test_uniform_slots_are_as_even_as_floors_and_experts_allow() -> None:
    room = Room(np.array([1, 4, 1]), np.array([8, 8, 2]), np.array([10, 10, 10]))
    got = [along(even_path(room), room, 10 * n).tolist() for n in (6, 8, 9, 10, 11, 14, 18)]
    assert got[:3] == [[1, 4, 1], [2, 4, 2], [3, 4, 2]]
    assert got[3:] == [[4, 4, 2], [5, 4, 2], [6, 6, 2], [8, 8, 2]]
    with pytest.raises(ValueError, match="less than the floor"):
        along(even_path(room), room, 59)


def demand_of(places: npt.NDArray[np.int32], n_expert: int) -> Demand:
    """The demand of steps whose experts need so many slots, (T, L, W)."""
    tables = [miss_table(np.ascontiguousarray(places[:, i]), TraceLayer(i, n_expert, 1, None)) for i in range(places.shape[1])]
    misses = [t @ np.arange(t.shape[1]) / len(places) for t in tables]
    return Demand(
        len(places),
        tuple(float(m[0]) for m in misses),
        tuple(misses),
        tuple(t.astype(np.float64) for t in tables),
        Steps(places, len(places), len(places), np.zeros(len(places), np.int8)),
    )


@st.composite
def works(draw: st.DrawFn) -> tuple[Room, list[Share], Clock, list[int]]:
    n_expert, layers, top_k = draw(st.integers(2, 8)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    room = Room(np.full(layers, top_k), np.full(layers, n_expert), random.integers(1, 4, layers) * 1000)
    count = draw(st.integers(1, 2))
    demands = [
        demand_of(random.integers(1, n_expert + 2, (draw(st.integers(1, 12)), layers, top_k)).astype(np.int32), n_expert)
        for _ in range(count)
    ]
    kind = draw(st.sampled_from(KINDS))
    clock = make_clock(kind, random.integers(0, 6, layers) * 1e-3, room.slot_bytes * 1e-6)
    budgets = sorted(draw(st.lists(st.integers(room.floor_bytes, room.most_bytes), min_size=2, max_size=4)))
    return room, [Share(1 / count, d) for d in demands], clock, budgets


def mean_stall(shares_: list[Share], slots: npt.NDArray[np.int64], clock: Clock) -> float:
    """Straight from the steps, not through the planner's curves."""
    total = 0.0
    for share in shares_:
        assert share.demand.steps is not None
        places = share.demand.steps.places
        misses = (places > slots[None, :, None]).sum(axis=2).astype(np.int32)
        total += share.weight * float(price(clock, misses).stall_s.mean())
    return total


@settings(max_examples=120)
@given(works())
def test_more_bytes_never_stall_longer_and_uniform_slots_are_never_better(
    drawn: tuple[Room, list[Share], Clock, list[int]],
) -> None:
    room, mix, clock, budgets = drawn
    planner = Planner(room, mix, clock)
    last = float("inf")
    for budget in budgets:
        choice = planner.plan(budget)
        check_fits(room, choice.slots, budget)
        stall = mean_stall(mix, choice.slots, clock)
        assert stall <= last + 1e-11
        uniform = along(even_path(room), room, budget)
        assert stall <= mean_stall(mix, uniform, clock) + 1e-11
        assert choice.is_uniform == (choice.slots == uniform).all()
        last = stall


@settings(max_examples=120)
@given(works())
def test_fewer_misses_than_uniform_and_never_more_for_more_bytes(drawn: tuple[Room, list[Share], Clock, list[int]]) -> None:
    room, mix, _clock, budgets = drawn
    planner = Planner(room, mix, None)

    def missed(slots: npt.NDArray[np.int64]) -> float:
        return sum(s.weight * sum(m[c] for m, c in zip(s.demand.misses, slots, strict=True)) for s in mix)

    counts = [missed(planner.plan(b).slots) for b in budgets]
    assert counts == sorted(counts, reverse=True)
    for budget, count in zip(budgets, counts, strict=True):
        assert count <= missed(along(even_path(room), room, budget))


@settings(max_examples=120)
@given(works())
def test_stall_by_tables_is_stall_by_steps(drawn: tuple[Room, list[Share], Clock, list[int]]) -> None:
    room, mix, clock, budgets = drawn
    slots = along(even_path(room), room, budgets[0])
    stall = sum(s.weight * stall_seconds(s.demand, slots, clock) for s in mix)
    assert stall == pytest.approx(mean_stall(mix, slots, clock), abs=1e-12)


def many_steps(layers: int, n_expert: int, steps: int = 200) -> Demand:
    """Every layer alike: short distances are more usual than long ones."""
    random = np.random.default_rng(7)
    places = np.minimum(random.geometric(0.15, (steps, layers, 2)), n_expert + 1)
    return demand_of(places.astype(np.int32), n_expert)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_early_layers_get_more_slots_where_fetches_of_late_ones_are_hidden(share: float) -> None:
    layers, n_expert = 8, 24
    room = Room(np.full(layers, 2), np.full(layers, n_expert), np.full(layers, 1000))
    demand = many_steps(layers, n_expert)
    clock = make_clock(ARRIVAL, np.full(layers, 1e-3), np.full(layers, 1.2e-3))
    budget = int(room.floor_bytes + share * (room.most_bytes - room.floor_bytes))
    slots = Planner(room, [Share(1.0, demand)], clock).plan(budget).slots
    assert slots[:2].mean() > 1.3 * slots[-4:].mean()
    uniform = along(even_path(room), room, budget)
    assert stall_seconds(demand, slots, clock) < 0.8 * stall_seconds(demand, uniform, clock)


def test_with_slack_in_late_layers_the_demand_clock_gives_early_ones_more_slots() -> None:
    layers, n_expert = 6, 24
    room = Room(np.full(layers, 2), np.full(layers, n_expert), np.full(layers, 1000))
    clock = make_clock(DEMAND, [0.0, 0.0, 0.0, 1e-3, 1e-3, 1e-3], np.full(layers, 1e-3))
    slots = Planner(room, [Share(1.0, many_steps(layers, n_expert))], clock).plan(room.most_bytes // 2).slots
    assert slots[:3].min() > slots[3:].max()


def test_the_arrival_plan_is_near_the_best_of_all_shares() -> None:
    layers, n_expert = 3, 10
    room = Room(np.full(layers, 1), np.full(layers, n_expert), np.full(layers, 1000))
    demand = many_steps(layers, n_expert, 100)
    clock = make_clock(ARRIVAL, np.full(layers, 1e-3), np.full(layers, 9e-4))
    planner = Planner(room, [Share(1.0, demand)], clock)
    grid = np.stack(np.meshgrid(*[np.arange(1, n_expert + 1)] * layers), axis=-1).reshape(-1, layers)
    stalls = np.array([stall_seconds(demand, slots, clock) for slots in grid])
    floor, ceiling = stalls.max(), stalls.min()
    for total in range(4, layers * n_expert):
        best = stalls[grid.sum(axis=1) <= total].min()
        got = stall_seconds(demand, planner.plan(total * 1000).slots, clock)
        assert got - best <= 0.02 * (floor - ceiling)


def test_random_sets_cost_their_exact_mean() -> None:
    n_expert, size = 5, 2
    places = np.full((4, 1, size), n_expert + 1, np.int32)
    demand = demand_of(places, n_expert)
    room = Room(np.array([2]), np.array([n_expert]), np.array([1000]))
    clock = make_clock(DEMAND, [1.5], [1.0])
    got = predict_random(demand, np.array([3]), room, clock)
    # 2 experts, 3 of 5 resident: none missed with 3/10, one with 6/10, two with 1/10; only two exceed the slack, by 0.5 s.
    assert got.misses_per_token == pytest.approx(0.8)
    assert got.hit_rate == pytest.approx(0.6)
    assert got.bytes_per_token == pytest.approx(800)
    assert got.stall_seconds_per_token == pytest.approx(0.05)
    assert got.seconds_per_token == pytest.approx(1.55)


def test_a_prediction_adds_up() -> None:
    places = np.array([[[1, 3], [2, 9]], [[2, 0], [1, 5]]], np.int32)  # the second step uses one expert in the first layer
    demand = demand_of(places, 8)
    room = Room(np.array([1, 1]), np.array([8, 8]), np.array([100, 10]))
    got = predict(demand, np.array([2, 4]), room, make_clock(BLOCKING, [1.0, 2.0], [10.0, 1.0]))
    assert got == Prediction(
        hit_rate=pytest.approx(1 - 3 / 7),
        misses_per_token=1.5,
        bytes_per_token=(100 + 20) / 2,
        seconds_per_token=3 + 6.0,
        stall_seconds_per_token=(10 + 2) / 2,
    )
    assert predict(demand, np.array([2, 4]), room, None).seconds_per_token is None


def test_a_mean_is_not_known_where_one_of_its_figures_is_not() -> None:
    rows: list[Any] = [(1.0, Prediction(0.5, 2.0)), (3.0, Prediction(0.9, None))]
    assert mean_prediction(rows) == Prediction(hit_rate=pytest.approx(0.8))
    assert mean_prediction([]) == Prediction()
