"""Decode steps across the layers: what one token misses in every layer at once, for any number of slots.

The miss tables of the layers do not say which misses fall on the same token, and a clock in which a layer waits for the
fetches of those before needs to know.  Traces say it.  A profile does not: its steps are drawn from the tables, with the
misses of each layer spread exactly as recorded and the layers taken as independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bel.formats.trace import DECODE
from bel.formats.trace_calls import LayerCalls, Trace
from bel.formats.trace_header import TraceLayer
from bel.profiler.compiled import compiled
from bel.profiler.miss_tables import call_distances

MAX_STEPS = 4096  # more than these change a mean time by less than a percent, and each plan prices some hundred candidates
_SEED = 20240501
Places = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Steps:
    """T decode steps of L layers.

    `places` (T, L, W) i32: the slots that each distinct expert of the step's call needs in its layer to be a hit, more than
    n_expert where nothing helps; 0 fills up.  With c slots the misses are the places above c.  `tokens` are those of the
    whole work, of which `recorded` steps are known and T drawn evenly.  `parts` (T,) i8: the half of the work, 0 or 1.
    """

    places: Places
    tokens: int
    recorded: int
    parts: npt.NDArray[np.int8]

    @property
    def weight(self) -> float:
        """Tokens that one step stands for, inverted: a sum over steps times this is a mean over tokens."""
        return self.recorded / max(len(self.places), 1) / max(self.tokens, 1)

    def half(self, part: int, tokens: int) -> Steps:
        """The steps of one half, which has so many tokens."""
        own = self.parts == part
        # Of all recorded steps as many are of this half as of those that were drawn.
        recorded = round(self.recorded * int(own.sum()) / max(len(self.places), 1))
        return Steps(np.ascontiguousarray(self.places[own]), tokens, recorded, self.parts[own])

    def misses(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """(T, L): the misses of each step with these slots in each layer."""
        misses = np.zeros(self.places.shape[:2], np.int32)
        _misses(self.places, slots, misses)
        return misses


def traced_steps(traces: Sequence[Trace], layers: Sequence[TraceLayer], folds: Sequence[npt.NDArray[np.int8]]) -> Steps:
    """The decode steps of traces of one workload.  `folds` has for each trace the half of each of its steps.

    A step is the calls of one ubatch; a layer without a call in it has no misses there.
    """
    tokens = sum(max((int(c.rows_per_call[c.phase == DECODE].sum()) for c in t.layers), default=0) for t in traces)
    parts = [_steps_of(trace) for trace in traces]
    width = max((p.shape[2] for p in parts), default=1)
    places = np.concatenate(
        [np.zeros((0, len(layers), width), np.int32)] + [np.pad(p, ((0, 0), (0, 0), (0, width - p.shape[2]))) for p in parts]
    )
    fold = np.concatenate([np.zeros(0, np.int8), *folds])
    kept = np.linspace(0, len(places) - 1, min(len(places), MAX_STEPS)).round().astype(np.int64)
    return Steps(np.ascontiguousarray(places[kept]), tokens, len(places), fold[kept])


def step_keys(calls: LayerCalls) -> npt.NDArray[np.int64]:
    """(decode calls, 2) i64: the ubatch of each call, and how many calls of the layer had that ubatch before it."""
    ubatch = calls.ubatch[calls.phase == DECODE]
    by_ubatch = np.argsort(ubatch, kind="stable")
    ordered = ubatch[by_ubatch]
    first = np.searchsorted(ordered, ordered)
    again = np.empty(len(ubatch), np.int64)
    again[by_ubatch] = np.arange(len(ubatch)) - first
    return np.stack([ubatch, again], axis=1)


def _steps_of(trace: Trace) -> Places:
    keys = [step_keys(c) for c in trace.layers]
    everything = np.unique(np.concatenate(keys), axis=0)
    distances = [call_distances(c) for c in trace.layers]
    places = np.zeros((len(everything), len(keys), max(d.shape[1] for d in distances)), np.int32)
    for layer, (own, distance) in enumerate(zip(keys, distances, strict=True)):
        places[_find(everything, own), layer, : distance.shape[1]] = distance
    return places


def _find(everything: npt.NDArray[np.int64], own: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    _, where = np.unique(np.concatenate([everything, own]), axis=0, return_inverse=True)
    return where.reshape(-1)[len(everything) :].astype(np.int64)


def drawn_steps(tables: Sequence[npt.NDArray[np.float64]], tokens: int, part: int = 0) -> Steps:
    """Steps drawn from the miss tables of the layers, each (n_expert + 1, width): the same tables give the same steps.

    Each layer's calls are sorted by how much they miss at every size at once (more slots never have more misses, so that
    one order fits all sizes), and steps take them at even distances, in an order of its own for each layer.
    """
    calls = max(round(float(t[0].sum())) for t in tables)
    count = min(calls, MAX_STEPS)
    random = np.random.default_rng(_SEED)
    places = np.zeros((count, len(tables), max(t.shape[1] for t in tables) - 1), np.int32)
    for layer, table in enumerate(tables):
        own = round(float(table[0].sum()))
        if not own:
            continue
        ranks = np.floor((np.arange(count) + 0.5) * calls / max(count, 1)).astype(np.int64)
        ranks = random.permutation(ranks)
        fewer = np.cumsum(table, axis=1) + (calls - own)  # a layer with fewer calls than the others has steps without one
        for n in range(1, table.shape[1]):
            # A call has n misses or more with c slots where no more calls than its rank have fewer: so up to here.
            places[:, layer, n - 1] = np.searchsorted(fewer[:, n - 1], ranks, side="right")
    return Steps(places, tokens, calls, np.full(count, part, np.int8))


@compiled
def _misses(places: Places, slots: npt.NDArray[np.int64], misses: npt.NDArray[np.int32]) -> None:
    for t in range(places.shape[0]):
        for i in range(places.shape[1]):
            for j in range(places.shape[2]):
                misses[t, i] += places[t, i, j] > slots[i]
