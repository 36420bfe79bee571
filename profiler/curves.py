"""Exact LRU hit curves of a layer: the hits at every capacity, from one pass over its calls.

Mattson's stack distances, for calls instead of single accesses.  All experts of a call
are looked up in the cache as it stands before the call; afterwards they lie on top of the LRU stack, the last used first.
A cache of c slots, cut to c before each call, then holds the c top entries of the stack: no expert of the call can have
been pushed out by another of the same call, and a call larger than c is served whole.  So an access hits at capacity c
exactly when its place in the stack before the call is at most c.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bel.formats.trace_calls import LayerCalls
from bel.profiler.compiled import compiled

PHASES = 2  # trace.PROMPT and trace.DECODE


@dataclass(frozen=True, slots=True)
class LruCurve:
    """One layer, one phase.  `hits` (n_expert + 1,) i64: the hits with 0, 1, .. n_expert slots.

    `accesses` are the distinct experts of each call, summed over the calls; `cold_misses` those never used before, by
    either phase: the cache is warm from prompt to decode.
    """

    accesses: int
    cold_misses: int
    hits: npt.NDArray[np.int64]


def lru_curves(calls: LayerCalls, *, cut: bool = True) -> tuple[LruCurve, LruCurve]:
    """The curves of the prompt and of the decode calls of one layer, from an empty cache at its first call.

    With `cut` false a call that is larger than the cache stays in it whole until the next call has been looked up, as
    other replays have it.
    """
    distances = np.zeros((PHASES, calls.info.n_expert + 1), np.int64)
    _stack_distances(np.ascontiguousarray(calls.ids), calls.row_start, calls.phase, cut, distances)
    prompt, decode = (_curve(distances[phase]) for phase in range(PHASES))
    return prompt, decode


def _curve(distances: npt.NDArray[np.int64]) -> LruCurve:
    """`distances` (n_expert + 1,): how many accesses had each distance; place 0 counts the cold ones."""
    hits = np.cumsum(distances)
    return LruCurve(accesses=int(hits[-1]), cold_misses=int(distances[0]), hits=hits - distances[0])


@compiled
def _stack_distances(
    ids: npt.NDArray[np.uint16],
    row_start: npt.NDArray[np.int64],
    phase: npt.NDArray[np.uint8],
    cut: bool,
    distances: npt.NDArray[np.int64],
) -> None:
    """Add the distance of every access to `distances` (2, n_expert + 1), 1 for the top of the stack, 0 for a cold access."""
    n_expert = distances.shape[1] - 1
    stack = np.empty(n_expert, np.int64)
    depth = 0  # entries of the stack
    in_stack = np.zeros(n_expert, np.bool_)
    called = np.full(n_expert, -1, np.int64)  # the last call that used the expert
    placed = np.full(n_expert, -1, np.int64)  # the last call that put it on top
    last_size = 0
    for c in range(len(phase)):
        histogram = distances[phase[c]]
        size = 0
        warm = 0
        for r in range(row_start[c], row_start[c + 1]):
            for j in range(ids.shape[1]):
                e = ids[r, j]
                if called[e] != c:
                    called[e] = c
                    size += 1
                    warm += in_stack[e]
        histogram[0] += size - warm
        # Down the stack to the deepest expert of the call.
        bottom = 0
        found = 0
        while found < warm:
            if called[stack[bottom]] == c:
                found += 1
                # A call that stays whole hits at every capacity from 1 up.
                histogram[1 if not cut and bottom < last_size else bottom + 1] += 1
            bottom += 1
        fresh = size - warm
        if fresh:
            for i in range(depth - 1, bottom - 1, -1):
                stack[i + fresh] = stack[i]
            depth += fresh
        # The others above that place move down, and the call's experts go on top, the last used first.
        to = bottom + fresh - 1
        for i in range(bottom - 1, -1, -1):
            if called[stack[i]] != c:
                stack[to] = stack[i]
                to -= 1
        top = 0
        for r in range(row_start[c + 1] - 1, row_start[c] - 1, -1):
            for j in range(ids.shape[1] - 1, -1, -1):
                e = ids[r, j]
                if placed[e] != c:
                    placed[e] = c
                    in_stack[e] = True
                    stack[top] = e
                    top += 1
        last_size = size
