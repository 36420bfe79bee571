"""Choosing the slots of each layer under a budget in bytes, and saying beforehand what the choice brings.

Misses are those of an LRU cache in each layer.  What is made smallest is the weighted mean over the workloads of the misses
per token, or of the stall per token under a clock (`clock.py`).  The plan is the best of the shares that `hulls.py` and
`arrival_paths.py` find, and of uniform slots; none of them takes a slot away for more bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from bel.formats.plan import Prediction
from bel.profiler.arrival_paths import WeightedSteps, arrival_paths
from bel.profiler.clock import ARRIVAL, Clock, layer_stall, price
from bel.profiler.decode_steps import drawn_steps
from bel.profiler.demand import Curve, Demand
from bel.profiler.hulls import Path, Room, Slots, along, along_and_fill, even_path, hull_path

_DIGITS = 12  # of seconds: a picosecond


@dataclass(frozen=True, slots=True)
class Share:
    """The weight of a demand in every mean."""

    weight: float
    demand: Demand


@dataclass(frozen=True, slots=True)
class Choice:
    """The slots of each layer, (L,) i64.  `is_uniform`: nothing better than uniform slots was found."""

    slots: Slots
    is_uniform: bool


class Planner:
    """Plans for one mix of workloads, at any budget.  Without a clock it makes misses smallest, with one the stall."""

    def __init__(self, room: Room, shares: Sequence[Share], clock: Clock | None) -> None:
        self._room, self._shares, self._clock = room, shares, clock
        self._even = even_path(room)
        self._curves = self._cost_curves()
        self._paths = self._make_paths()

    def plan(self, budget_bytes: int) -> Choice:
        """The best slots for a budget of at least `room.floor_bytes`; more than `room.most_bytes` is of no use."""
        uniform = along(self._even, self._room, budget_bytes)
        found = [along(path, self._room, budget_bytes) for path in self._paths]
        if self._curves is not None:
            found.append(along_and_fill(self._paths[0], self._room, budget_bytes, self._curves))
        distinct = [np.array(slots) for slots in dict.fromkeys(tuple(s.tolist()) for s in [uniform, *found])]
        costs = [self._cost(slots) for slots in distinct]
        best = distinct[costs.index(min(costs))]  # the first of equals, and uniform comes first
        return Choice(best, bool((best == uniform).all()))

    def _cost(self, slots: Slots) -> tuple[float, float]:
        """What is to be smallest, and what decides between equals."""
        missed = self._weighted(lambda d: float(_at(d.misses, slots).sum()))
        if self._clock is None:
            return (missed, 0.0)
        clock = self._clock
        # Without rounding, equals would differ by the order of their sums.
        return (round(self._weighted(lambda d: stall_seconds(d, slots, clock)), _DIGITS), missed)

    def _weighted(self, figure: Callable[[Demand], float]) -> float:
        return sum(s.weight * figure(s.demand) for s in self._shares)

    def _cost_curves(self) -> list[Curve] | None:
        """The cost of each layer by its slots; None where it depends on the other layers."""
        if self._clock is not None and self._clock.kind == ARRIVAL:
            return None
        clock = self._clock
        return self._mean(lambda d, i: d.misses[i] if clock is None else _stall_curve(d, i, clock))

    def _mean(self, curve: Callable[[Demand, int], Curve]) -> list[Curve]:
        return [np.sum([s.weight * curve(s.demand, i) for s in self._shares], axis=0) for i in range(len(self._room.floor))]

    def _make_paths(self) -> list[Path]:
        clock = self._clock
        if clock is None:
            assert self._curves is not None, "misses do not depend on other layers"
            return [hull_path(self._room, [self._curves])]
        transfer = self._mean(lambda d, i: d.misses[i] * clock.fetch_s[i])
        if self._curves is not None:
            return [hull_path(self._room, [self._curves, transfer])]
        works = [WeightedSteps(s.weight, s.demand.steps) for s in self._shares if s.demand.steps is not None]
        return arrival_paths(self._room, works, clock, transfer)


def stall_seconds(demand: Demand, slots: Slots, clock: Clock) -> float:
    """The stall per token.  The demand must know its tables and steps."""
    if clock.kind == ARRIVAL:
        assert demand.steps is not None, "a demand with a clock knows its steps"
        return float(price(clock, demand.steps.misses(slots)).stall_s.sum() * demand.steps.weight)
    return float(sum(_stall_curve(demand, i, clock)[c] for i, c in enumerate(slots)))


def _stall_curve(demand: Demand, layer: int, clock: Clock) -> Curve:
    assert demand.tables is not None, "a demand with a clock knows its tables"
    table = demand.tables[layer]
    curve: Curve = table @ layer_stall(clock, layer, table.shape[1] - 1) / demand.tokens
    return curve


def _at(curves: Sequence[Curve], slots: Slots) -> Curve:
    return np.array([curve[c] for curve, c in zip(curves, slots, strict=True)])


def predict(demand: Demand, slots: Slots, room: Room, clock: Clock | None) -> Prediction:
    """What `slots` bring for a demand."""
    misses = _at(demand.misses, slots)
    stall = compute = None
    if clock is not None and demand.steps is not None:
        stall = stall_seconds(demand, slots, clock)
        compute = float(clock.layer_s.sum()) * demand.steps.recorded / demand.tokens
    return _prediction(sum(demand.accesses), misses, room, compute, stall)


def _prediction(accesses: float, misses: Curve, room: Room, compute: float | None, stall: float | None) -> Prediction:
    missed = float(misses.sum())
    return Prediction(
        hit_rate=1 - missed / accesses if accesses else None,
        misses_per_token=missed,
        bytes_per_token=float(misses @ room.slot_bytes),
        seconds_per_token=None if compute is None or stall is None else compute + stall,
        stall_seconds_per_token=stall,
    )


def predict_random(demand: Demand, slots: Slots, room: Room, clock: Clock | None) -> Prediction:
    """What to expect of sets drawn at random in each layer, held all the time: the exact mean over all sets of that size."""
    missed = np.array([a * (1 - c / n) for a, c, n in zip(demand.accesses, slots, room.most, strict=True)])
    if clock is None or demand.tables is None or demand.steps is None:
        return _prediction(sum(demand.accesses), missed, room, None, None)
    tables = [_random_table(t[0], int(c), int(n)) for t, c, n in zip(demand.tables, slots, room.most, strict=True)]
    drawn = Demand(demand.tokens, demand.accesses, (), tuple(tables), drawn_steps(tables, demand.tokens))
    stall = stall_seconds(drawn, np.zeros_like(slots), clock)
    compute = float(clock.layer_s.sum()) * demand.steps.recorded / demand.tokens
    return _prediction(sum(demand.accesses), missed, room, compute, stall)


def _random_table(sizes: Curve, slots: int, n_expert: int) -> Curve:
    """(1, width): expected calls with n misses, where `sizes` (width,) are the calls of n experts: hypergeometric."""
    table = np.zeros((1, len(sizes)))
    for size in np.flatnonzero(sizes).tolist():
        for missed in range(max(0, size - slots), min(size, n_expert - slots) + 1):
            odds = comb(size, missed) * comb(n_expert - size, n_expert - slots - missed) / comb(n_expert, slots)
            table[0, missed] += sizes[size] * odds
    return table


def predict_belady(demand: Demand, most_hits: Sequence[Curve], slots: Slots, room: Room) -> Prediction:
    """The fewest misses of any cache with these slots.  Its times are not known: it saves misses, wherever they stall."""
    misses = np.array(demand.accesses) - _at(most_hits, slots)
    return _prediction(sum(demand.accesses), misses, room, None, None)


def mean_prediction(rows: Sequence[tuple[float, Prediction]]) -> Prediction:
    """The weighted mean of each figure; None where one of them is not known, or there are none."""

    def mean(name: str) -> float | None:
        values = [(weight, getattr(row, name)) for weight, row in rows]
        if not values or any(v is None for _, v in values):
            return None
        return float(sum(w * v for w, v in values) / sum(w for w, _ in values))

    return Prediction(*(mean(name) for name in Prediction.__dataclass_fields__))
