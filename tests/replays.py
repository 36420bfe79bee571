"""Plain replays of calls, as PROFILING.md words the rules, and calls to replay."""

from __future__ import annotations

from hypothesis import strategies as st

from bel.formats.trace import DECODE, PROMPT
from routes import some_row
from simulated import LAYERS, Calls


def replay_lru(calls: Calls, place: int, slots: int, phases: set[int]) -> tuple[int, int, int]:
    """Accesses, hits and cold misses of one layer, as PROFILING.md words the rules: a list, the least recent first."""
    cache: list[int] = []
    seen: set[int] = set()
    accesses = hits = cold = 0
    for phase, where, rows in calls:
        if where != place:
            continue
        cache = cache[max(len(cache) - slots, 0) :]
        used = {e for row in rows for e in row}
        if phase in phases:
            accesses, hits, cold = accesses + len(used), hits + len(used & set(cache)), cold + len(used - seen)
        seen |= used
        for e in [e for row in rows for e in row]:
            cache = [x for x in cache if x != e] + [e]
    return accesses, hits, cold


def replay_set(calls: Calls, place: int, resident: set[int], phases: set[int]) -> tuple[int, int]:
    """Hits and cold misses of a fixed set."""
    seen: set[int] = set()
    hits = cold = 0
    for phase, where, rows in calls:
        if where == place:
            used = {e for row in rows for e in row}
            if phase in phases:
                hits, cold = hits + len(used & resident), cold + len(used - resident - seen)
            seen |= used
    return hits, cold


@st.composite
def mixed_calls(draw: st.DrawFn) -> Calls:
    place = draw(st.integers(0, 1))
    row, other = (some_row(LAYERS[at].n_expert, LAYERS[at].top_k) for at in (place, 1 - place))
    phase = st.sampled_from([PROMPT, DECODE])
    mine = st.tuples(phase, st.just(place), st.lists(row, min_size=1, max_size=3))
    yours = st.tuples(phase, st.just(1 - place), st.lists(other, min_size=1, max_size=3))
    return draw(st.lists(st.one_of(mine, yours), max_size=16))
