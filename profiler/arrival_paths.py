"""Orders of granting slots for the arrival clock, in which the stall of a layer depends on the layers before it.

The stall of a token is the largest excess of fetches over compute up to some layer (`clock.py`).  A miss less in layer j makes
it smaller only where that layer comes at or behind j: the miss is *late* there.  So for given slots the stall falls
with late misses only, early layers have more of them, and with late misses alone as the cost the layers no longer depend on
each other: `hulls.hull_path` orders the slots.  Which misses are late changes with the slots.  A few rounds of
that, averaged as M. Frank and P. Wolfe do (Naval Research Logistics 3, 1956), give a path for one budget; doing so at
budgets spread over the whole range gives a handful of paths.  They do not depend on the budget that is asked for, and the
best of them is taken there, so that more bytes never stall longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bel.profiler.clock import Clock
from bel.profiler.compiled import compiled
from bel.profiler.decode_steps import Places, Steps
from bel.profiler.hulls import Curves, Path, Room, along, hull_path

BUDGETS = 16  # along the range from the floor to all experts
ROUNDS = 5
BLENDS = (0.02, 0.2)
"""Shares of all misses in the cost of further paths: where stall is gone or nearly so, they also read less."""


@dataclass(frozen=True, slots=True)
class WeightedSteps:
    """The decode steps of a workload and its share in the mean."""

    weight: float
    steps: Steps


def arrival_paths(room: Room, works: Sequence[WeightedSteps], clock: Clock, transfer: Curves) -> list[Path]:
    """The paths.  `transfer`: for each layer the seconds of fetches per token with 0, 1, .. slots, late or not."""
    paths = [hull_path(room, [transfer])]
    for number in range(1, BUDGETS):
        budget = room.floor_bytes + (room.most_bytes - room.floor_bytes) * number // BUDGETS
        mean, path = list(transfer), paths[0]
        for turn in range(ROUNDS):
            late = late_curves(room, works, clock, along(path, room, budget))
            share = 2 / (turn + 2)
            mean = [a + share * (b - a) for a, b in zip(mean, late, strict=True)]
            path = hull_path(room, [mean, transfer])
            paths.append(path)
        for blend in BLENDS:
            paths.append(hull_path(room, [[a + blend * (b - a) for a, b in zip(mean, transfer, strict=True)], transfer]))
    return paths


def late_curves(
    room: Room, works: Sequence[WeightedSteps], clock: Clock, slots: npt.NDArray[np.int64]
) -> list[npt.NDArray[np.float64]]:
    """For each layer (n_expert + 1,): seconds of fetches per token that are late with `slots`, had the layer 0, 1, .. slots."""
    by_place = np.zeros((len(slots), int(room.most.max()) + 2))
    for work in works:
        weight = work.weight * work.steps.weight
        _late(work.steps.places, slots, clock.layer_s, clock.fetch_s, weight, by_place)
    # An expert at place p is missed with fewer than p slots.
    missed = np.cumsum(by_place[:, ::-1], axis=1)[:, ::-1]
    return [missed[layer, 1 : most + 2].copy() for layer, most in enumerate(room.most)]


@compiled
def _late(
    places: Places,
    slots: npt.NDArray[np.int64],
    layer_s: npt.NDArray[np.float64],
    fetch_s: npt.NDArray[np.float64],
    weight: float,
    by_place: npt.NDArray[np.float64],
) -> None:
    """Add the fetches of the layers up to the one that sets the stall of each step, by the place that they need."""
    for t in range(places.shape[0]):
        worst = 0.0
        last = -1
        fetched = 0.0
        computed = 0.0
        for i in range(places.shape[1]):
            for j in range(places.shape[2]):
                if places[t, i, j] > slots[i]:
                    fetched += fetch_s[i]
            if fetched - computed > worst:
                worst = fetched - computed
                last = i
            computed += layer_s[i]
        for i in range(last + 1):
            for j in range(places.shape[2]):
                if places[t, i, j] > 0:
                    by_place[i, places[t, i, j]] += weight * fetch_s[i]
