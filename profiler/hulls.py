"""Sharing bytes between layers whose cost falls with their slots: steps along the lower convex hulls, most gain per byte first.

A *curve* is the cost of a layer with 0, 1, .. n_expert slots.  The hull's steps of one layer gain less and less per byte, so
taking all layers' steps by gain per byte is optimal wherever a step ends, and off by less than one step between (the
relaxation of the multiple-choice knapsack: P. Sinha, A. Zoltners, Operations Research 27(3), 1979).

A *path* is the order in which slots are granted, from the floor up to every expert; it does not depend on the budget, which
only says how far along it one comes.  So more bytes never take a slot away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bel.profiler.compiled import compiled

Curves = Sequence[npt.NDArray[np.float64]]
Slots = npt.NDArray[np.int64]
_NOISE = 1e-12  # of the largest cost: a smaller gain is a rounding error


@dataclass(frozen=True, slots=True)
class Room:
    """What may be chosen: in each of L layers `floor` (L,) to `most` (L,) slots of `slot_bytes` (L,), all i64."""

    floor: Slots
    most: Slots
    slot_bytes: Slots

    @property
    def floor_bytes(self) -> int:
        """The smallest budget."""
        return int(self.floor @ self.slot_bytes)

    @property
    def most_bytes(self) -> int:
        """The largest budget that is of use."""
        return int(self.most @ self.slot_bytes)


@dataclass(frozen=True, slots=True)
class Path:
    """Steps in the order in which they are taken: `layer`, the `slots` added, and their `bytes`; (S,) i64 each."""

    layer: Slots
    slots: Slots
    bytes: Slots


def hull_path(room: Room, goals: Sequence[Curves]) -> Path:
    """The path for the first of `goals`; where that gains nothing more it follows the next.  Ends with all slots granted."""
    at = room.floor.copy()
    taken = []
    for number, curves in enumerate(goals):
        steps = _hull_steps(room, curves, at)
        if number < len(goals) - 1:
            largest = max((float(np.abs(c).max()) for c in curves if len(c)), default=0.0)
            steps = steps[steps[:, 3] > _NOISE * largest]
        order = np.lexsort((steps[:, 0], steps[:, 1] / room.most[steps[:, 0].astype(np.int64)], -steps[:, 4]))
        taken.append(steps[order])
        np.add.at(at, steps[:, 0].astype(np.int64), (steps[:, 2] - steps[:, 1]).astype(np.int64))
    flat = np.concatenate(taken)
    layer = flat[:, 0].astype(np.int64)
    added = (flat[:, 2] - flat[:, 1]).astype(np.int64)
    return Path(layer, added, added * room.slot_bytes[layer])


def even_path(room: Room) -> Path:
    """One slot more in each layer by turns, the first layers first, until all have all their experts: uniform slots."""
    rounds = [
        np.flatnonzero((room.floor <= level) & (level < room.most))
        for level in range(int(room.floor.min()), int(room.most.max()))
    ]
    layer = np.concatenate([np.zeros(0, np.int64), *rounds]).astype(np.int64)
    return Path(layer, np.ones(len(layer), np.int64), room.slot_bytes[layer])


def along(path: Path, room: Room, budget_bytes: int) -> Slots:
    """(L,): the slots that a budget of at least the floor buys; the first step that no longer fits is taken in part."""
    whole, slots, left = _whole_steps(path, room, budget_bytes)
    if whole < len(path.layer):
        layer = path.layer[whole]
        slots[layer] += min(left // room.slot_bytes[layer], path.slots[whole])
    return slots


def along_and_fill(path: Path, room: Room, budget_bytes: int, curves: Curves) -> Slots:
    """As `along`, but what the whole steps leave is shared out by an exact search, in units of the smallest slot.

    A larger budget never ends with a higher cost: between two whole steps the search has more units, and what it gains is
    less than the next whole step does, which has more gain per byte than anything behind it.
    """
    _, slots, left = _whole_steps(path, room, budget_bytes)
    unit = int(room.slot_bytes.min())
    more = _best_share(slots, room, left // unit, unit, curves)
    return slots + more if more.any() else along(path, room, budget_bytes)


def _best_share(slots: Slots, room: Room, units: int, unit: int, curves: Curves) -> Slots:
    """(L,): the slots to add that lower the cost most where a layer's n slots cost as many whole units as hold them."""
    gained = np.zeros(units + 1)
    chosen = np.zeros((len(slots), units + 1), np.int64)
    for layer, curve in enumerate(curves):
        added = np.arange(min(units * unit // room.slot_bytes[layer], room.most[layer] - slots[layer]) + 1)
        gains = np.asarray(curve[slots[layer]] - curve[slots[layer] + added], np.float64)
        gained = _add_layer(gained, gains, -(-added * room.slot_bytes[layer] // unit), chosen[layer])
    answer, at = np.zeros(len(slots), np.int64), units
    for layer in range(len(slots) - 1, -1, -1):
        answer[layer] = chosen[layer, at]
        at -= -(-int(answer[layer] * room.slot_bytes[layer]) // unit)
    return answer


@compiled
def _add_layer(
    gained: npt.NDArray[np.float64], gains: npt.NDArray[np.float64], costs: Slots, chosen: Slots
) -> npt.NDArray[np.float64]:
    """The most gain with 0, 1, .. units when one more layer shares them; writes how many slots it takes to `chosen`."""
    best = gained.copy()
    for units in range(len(gained)):
        for n in range(1, len(gains)):
            if costs[n] <= units and gained[units - costs[n]] + gains[n] > best[units]:
                best[units] = gained[units - costs[n]] + gains[n]
                chosen[units] = n
    return best


def _whole_steps(path: Path, room: Room, budget_bytes: int) -> tuple[int, Slots, int]:
    """How many steps fit whole, the slots after them, and the bytes left."""
    left = budget_bytes - room.floor_bytes
    if left < 0:
        raise ValueError(f"{budget_bytes} bytes are less than the floor of {room.floor_bytes}")
    spent = np.cumsum(path.bytes)
    whole = int(np.searchsorted(spent, left, side="right"))
    slots = room.floor.copy()
    np.add.at(slots, path.layer[:whole], path.slots[:whole])
    return whole, slots, left - (int(spent[whole - 1]) if whole else 0)


def _hull_steps(room: Room, curves: Curves, at: Slots) -> npt.NDArray[np.float64]:
    """(S, 5): layer, slots from, slots to, gain, and gain per byte, of the hull of each layer from `at` up."""
    rows = [np.zeros((0, 5))]
    for layer, curve in enumerate(curves):
        low, high = int(at[layer]), int(room.most[layer])
        if low >= high:
            continue
        corners = lower_hull(np.ascontiguousarray(curve[low : high + 1], np.float64)) + low
        a, b = corners[:-1], corners[1:]
        gain = curve[a] - curve[b]
        rows.append(np.stack([np.full(len(a), layer), a, b, gain, gain / ((b - a) * room.slot_bytes[layer])], axis=1))
    return np.concatenate(rows)


@compiled
def lower_hull(curve: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The corners of the lower convex hull of (0, curve[0]), (1, curve[1]), .., ascending, with the points on it."""
    corners = np.empty(len(curve), np.int64)
    size = 0
    for i in range(len(curve)):
        while size >= 2:
            a = corners[size - 2]
            b = corners[size - 1]
            if (curve[b] - curve[a]) * (i - a) <= (curve[i] - curve[a]) * (b - a):
                break
            size -= 1
        corners[size] = i
        size += 1
    return corners[:size].copy()
