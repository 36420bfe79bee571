"""A plan with everything that is shown beside it: held-out halves, uniform slots, random sets, Belady, each workload alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bel.formats.errors import UsageError
from bel.formats.plan import (
    BELADY,
    HELD_OUT,
    IN_SAMPLE,
    MISSES,
    RANDOM,
    STALL,
    UNIFORM,
    Plan,
    PlanLayer,
    PlanWork,
    Prediction,
)
from bel.formats.profile import Profile, expert_shares
from bel.formats.units import format_bytes
from bel.profiler.clock import BLOCKING, Clock, make_clock
from bel.profiler.demand import Demand, WorkDemand
from bel.profiler.hulls import Room, Slots, along, even_path
from bel.profiler.locality import by_use
from bel.profiler.plan_inputs import PlanInput, slot_sizes
from bel.profiler.planner import Choice, Planner, Share, mean_prediction, predict, predict_belady, predict_random

LRU, COUNTS = "lru", "static"


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan; `is_uniform`: nothing better than uniform slots was found.  `note` says what was clamped, "" if nothing.

    `uniform` are the slots of each layer that the plan is compared with, of the same bytes.  `blocking` is the seconds per
    token of the plan and of uniform slots where fetches hide behind nothing, and `link_bytes_per_s` the rate of the link
    that misses come over; both None without times.
    """

    plan: Plan
    is_uniform: bool
    note: str
    uniform: tuple[int, ...]
    blocking: tuple[float, float] | None
    link_bytes_per_s: float | None

    def transfer_seconds(self, column: str) -> float | None:
        """Seconds per token in which the link is busy, for a column of `plan.predicted`; partly hidden behind compute."""
        moved = self.plan.predicted[column].bytes_per_token
        return None if moved is None or self.link_bytes_per_s is None else moved / self.link_bytes_per_s


def make_plan(given: PlanInput, budget_bytes: int, objective: str, clock: Clock | None, notes: Sequence[str] = ()) -> Planned:
    """Plan for the mix of the workloads.  A clock is needed for the objective `stall`; with one, misses are priced too.

    Raises UsageError where not even top-k slots of each layer fit.
    """
    layers = given.profile.layers
    room = Room(
        np.array([x.top_k for x in layers], np.int64), np.array([x.n_expert for x in layers], np.int64), slot_sizes(given)
    )
    if budget_bytes < room.floor_bytes:
        raise UsageError(
            f"{budget_bytes} bytes for slots are below the floor: top-k slots in each of {len(layers)} layers take "
            f"{room.floor_bytes} bytes ({format_bytes(room.floor_bytes)})",
            hint=f"The smallest --slots-bytes that works is {room.floor_bytes}",
        )
    note = ""
    if budget_bytes > room.most_bytes:
        note = f"{budget_bytes} bytes are more than all experts take: clamped to {room.most_bytes}"
    bench = _Bench(room, given.works, objective, clock, min(budget_bytes, room.most_bytes))
    choice = bench.choose(given.works)
    return Planned(
        Plan(
            model_name=given.profile.model_name,
            arch=given.profile.arch,
            fingerprint=given.profile.fingerprint,
            objective=objective,
            clock=None if clock is None else clock.kind,
            policy=COUNTS if given.by_counts else LRU,
            split=next((w.split for w in given.works if w.split), None),
            budget_bytes=budget_bytes,
            layers=_layers(given.profile, room, choice.slots),
            predicted=bench.columns(choice.slots),
            workloads=tuple(bench.work(w, choice.slots) for w in given.works),
            profile_digests=given.digests,
            notes=tuple(notes),
        ),
        choice.is_uniform,
        note,
        bench.uniform,
        bench.blocking(choice.slots),
        None if clock is None else float(room.slot_bytes.sum() / clock.fetch_s.sum()),
    )


def _layers(profile: Profile, room: Room, slots: Slots) -> tuple[PlanLayer, ...]:
    return tuple(
        PlanLayer(info.layer, info.n_expert, info.top_k, int(size), int(c), _preload(profile, place, int(c)))
        for place, (info, size, c) in enumerate(zip(profile.layers, room.slot_bytes, slots, strict=True))
    )


def _preload(profile: Profile, place: int, slots: int) -> tuple[int, ...]:
    """The experts with the largest share of the layer's decode selections, the weighted mean over the workloads."""
    shares = expert_shares(profile, place, "decode")
    wanted = np.zeros(profile.layers[place].n_expert) if shares is None else np.array(shares)
    return tuple(by_use(wanted)[:slots].tolist())


class _Bench:
    """Plans and figures at one budget."""

    def __init__(self, room: Room, works: Sequence[WorkDemand], objective: str, clock: Clock | None, budget_bytes: int) -> None:
        assert objective == MISSES or clock is not None, "a stall needs a clock"
        self._room, self._works, self._clock, self._budget = room, works, clock, budget_bytes
        self._aim = clock if objective == STALL else None
        self._uniform = along(even_path(room), room, budget_bytes)
        self._held_out = self._plan_halves()

    @property
    def uniform(self) -> tuple[int, ...]:
        """Uniform slots of each layer."""
        return tuple(self._uniform.tolist())

    def choose(self, works: Sequence[WorkDemand]) -> Choice:
        """The plan for a mix."""
        return self._choose([Share(w.weight, w.whole) for w in works])

    def _choose(self, shares: Sequence[Share]) -> Choice:
        return Planner(self._room, shares, self._aim).plan(self._budget)

    def _plan_halves(self) -> tuple[Slots, Slots] | None:
        """The slots for the first halves of all workloads, and those for the second."""
        if any(w.halves is None for w in self._works):
            return None
        one, other = (
            self._choose([Share(w.weight, w.halves[i]) for w in self._works if w.halves is not None]).slots for i in (0, 1)
        )
        return one, other

    def columns(self, slots: Slots) -> dict[str, Prediction]:
        """The figures of the mix."""
        works = self._works
        return {
            IN_SAMPLE: mean_prediction([(w.weight, self._predict(w.whole, slots)) for w in works]),
            HELD_OUT: mean_prediction([(w.weight, self._predict_held_out(w)) for w in works]),
            UNIFORM: mean_prediction([(w.weight, self._predict(w.whole, self._uniform)) for w in works]),
            RANDOM: mean_prediction(
                [(w.weight, predict_random(w.whole, self._uniform, self._room, self._clock)) for w in works]
            ),
            BELADY: mean_prediction(
                [
                    (w.weight, Prediction() if w.belady is None else predict_belady(w.whole, w.belady, slots, self._room))
                    for w in works
                ]
            ),
        }

    def _predict(self, demand: Demand, slots: Slots) -> Prediction:
        return predict(demand, slots, self._room, self._clock)

    def _predict_held_out(self, work: WorkDemand) -> Prediction:
        """Each half under the plan of the other, weighted by its tokens."""
        if self._held_out is None or work.halves is None:
            return Prediction()
        one, other = self._held_out
        first, second = work.halves
        return mean_prediction([(first.tokens, self._predict(first, other)), (second.tokens, self._predict(second, one))])

    def blocking(self, slots: Slots) -> tuple[float, float] | None:
        """Seconds per token of `slots` and of uniform ones where every fetch is waited for."""
        if self._clock is None:
            return None
        clock = make_clock(BLOCKING, self._clock.layer_s, self._clock.fetch_s)
        mine, uniform = (
            mean_prediction([(w.weight, predict(w.whole, c, self._room, clock)) for w in self._works])
            for c in (slots, self._uniform)
        )
        if mine.seconds_per_token is None or uniform.seconds_per_token is None:
            return None
        return mine.seconds_per_token, uniform.seconds_per_token

    def work(self, work: WorkDemand, slots: Slots) -> PlanWork:
        """The figures of one workload, beside those of a plan of its own."""
        alone = replace(work, weight=1.0)
        own_slots = slots if len(self._works) == 1 else self.choose([alone]).slots
        in_sample, own = self._predict(work.whole, slots), self._predict(work.whole, own_slots)
        return PlanWork(
            name=work.name,
            weight=work.weight,
            in_sample=in_sample,
            held_out=self._predict_held_out(work),
            uniform=self._predict(work.whole, self._uniform),
            own=own,
            regret=_regret(in_sample, own, by_time=self._aim is not None),
        )


def _regret(shared: Prediction, own: Prediction, *, by_time: bool) -> float | None:
    name = "seconds_per_token" if by_time else "misses_per_token"
    mine, best = getattr(shared, name), getattr(own, name)
    return None if mine is None or not best else float(mine / best - 1)
