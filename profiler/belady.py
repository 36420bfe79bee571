"""The most hits that any cache could have: Belady's MIN for calls, at every capacity in one pass over a layer.

The model is that of `curves.py`: all experts of a call are looked up in the cache as it stands before the call, and all of
them enter it.  A cache of c slots then keeps the call's experts and the best of the others; a call of more than c experts
leaves only its own, the best c of them.  Best means used again soonest (L. A. Belady, "A study of replacement algorithms
for a virtual-storage computer", IBM Systems Journal 5(2), 1966).

MIN is a stack algorithm (R. L. Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2),
1970): the cache of c slots holds the top c entries of one list for all c.  The list after a call is the call's experts,
soonest use first, and below them the others, merged downwards: at each place the best of those that lost a place so far.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bel.formats.trace import DECODE, PROMPT
from bel.formats.trace_calls import LayerCalls
from bel.profiler.compiled import compiled

BOTH_PHASES = (PROMPT, DECODE)


def belady_hits(calls: LayerCalls, phases: tuple[int, ...] = BOTH_PHASES) -> npt.NDArray[np.int64]:
    """The most hits that accesses of `phases` can have with 0, 1, .. n_expert slots: (n_expert + 1,) i64.

    The cache is empty before the first call and sees every call, of whatever phase; accesses of the other phases bring
    experts in and count for nothing, so this bounds the hits of any policy in those phases.
    """
    counted = np.zeros(len(BOTH_PHASES), np.bool_)
    counted[list(phases)] = True
    ids = np.ascontiguousarray(calls.ids)
    next_call = np.empty(ids.shape, np.int64)
    _next_calls(ids, calls.row_start, counted[calls.phase], calls.info.n_expert, next_call)
    histogram = np.zeros(calls.info.n_expert + 1, np.int64)
    _stack_places(ids, calls.row_start, counted[calls.phase], next_call, histogram)
    histogram[0] = 0  # cold
    return np.cumsum(histogram)


@compiled
def _next_calls(
    ids: npt.NDArray[np.uint16],
    row_start: npt.NDArray[np.int64],
    counted: npt.NDArray[np.bool_],
    n_expert: int,
    next_call: npt.NDArray[np.int64],
) -> None:
    """Write for each id the call that uses its expert next, or the number of calls where that one counts for nothing."""
    never = len(counted)
    upcoming = np.full(n_expert, never, np.int64)
    for c in range(len(counted) - 1, -1, -1):
        for r in range(row_start[c], row_start[c + 1]):
            for j in range(ids.shape[1]):
                next_call[r, j] = upcoming[ids[r, j]]
        for r in range(row_start[c], row_start[c + 1]):
            for j in range(ids.shape[1]):
                # An uncounted call brings the expert in by itself: to have kept it until then is worth nothing.
                upcoming[ids[r, j]] = c if counted[c] else never


@compiled
def _stack_places(
    ids: npt.NDArray[np.uint16],
    row_start: npt.NDArray[np.int64],
    counted: npt.NDArray[np.bool_],
    next_call: npt.NDArray[np.int64],
    histogram: npt.NDArray[np.int64],
) -> None:
    """Count in `histogram` (n_expert + 1,) at which place of the list each counted access is found, 1 for the top."""
    n_expert = len(histogram) - 1
    stack = np.empty(n_expert, np.int64)
    depth = 0
    is_in_call = np.zeros(n_expert, np.bool_)
    wanted = np.zeros(n_expert, np.int64)  # the next call of each expert
    own = np.empty(n_expert, np.int64)  # the call's experts, soonest use first
    losers = np.empty(n_expert, np.int64)  # those that lost a place, soonest use last
    for c in range(len(counted)):
        size = 0
        for r in range(row_start[c], row_start[c + 1]):
            for j in range(ids.shape[1]):
                e = np.int64(ids[r, j])
                if is_in_call[e]:
                    continue
                is_in_call[e] = True
                wanted[e] = next_call[r, j]
                at = size
                while at > 0 and wanted[own[at - 1]] > wanted[e]:
                    own[at] = own[at - 1]
                    at -= 1
                own[at] = e
                size += 1
        found = 0
        place = 0
        n_losers = 0
        # Below the deepest expert of the call nothing has lost a place: the rest of the list stays as it is.
        while place < depth and (place < size or n_losers > 0):
            e = stack[place]
            if is_in_call[e]:
                found += 1
                if counted[c]:
                    histogram[place + 1] += 1
            else:
                at = n_losers
                while at > 0 and wanted[losers[at - 1]] < wanted[e]:
                    losers[at] = losers[at - 1]
                    at -= 1
                losers[at] = e
                n_losers += 1
            if place < size:
                stack[place] = own[place]
            else:
                n_losers -= 1
                stack[place] = losers[n_losers]
            place += 1
        for i in range(place, size):
            stack[i] = own[i]
        place = max(place, size)
        while n_losers > 0:
            n_losers -= 1
            stack[place] = losers[n_losers]
            place += 1
        depth = max(depth, place)
        if counted[c]:
            histogram[0] += size - found
        for i in range(size):
            is_in_call[own[i]] = False
