"""Miss tables: equal to a replay with a plain list, to the LRU curves, and read as hostile input."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.trace import DECODE, PROMPT
from bel.formats.trace_calls import LayerCalls
from bel.formats.trace_header import TraceLayer
from bel.profiler.curves import lru_curves
from bel.profiler.decode_steps import drawn_steps
from bel.profiler.miss_tables import (
    belady_from_json,
    call_distances,
    decode_misses,
    miss_table,
    misses_from_json,
    misses_to_json,
    pool,
)
from routes import Call, draw_rows, layer_calls


@st.composite
def random_layer(draw: st.DrawFn) -> LayerCalls:
    n_expert = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, min(4, n_expert)))
    row = st.lists(st.integers(0, n_expert - 1), min_size=top_k, max_size=top_k)  # an id may come twice
    call = st.tuples(st.sampled_from([PROMPT, DECODE]), st.lists(row, min_size=1, max_size=3))
    return layer_calls(draw(st.lists(call, max_size=20)), n_expert, top_k)


def replay(calls: LayerCalls, slots: int) -> list[int]:
    """How many experts each decode call misses: a list from the most to the least recently used, cut before each call."""
    cache: list[int] = []
    missed = []
    for c, phase in enumerate(calls.phase):
        rows = calls.ids[calls.row_start[c] : calls.row_start[c + 1]].tolist()
        cache = cache[:slots]
        if phase == DECODE:
            missed.append(len({e for row in rows for e in row} - set(cache)))
        for e in [e for row in rows for e in row]:
            cache = [e, *(x for x in cache if x != e)]
    return missed


@settings(max_examples=150)
@given(random_layer())
def test_the_table_is_that_of_a_replay_and_sums_to_the_lru_curve(calls: LayerCalls) -> None:
    table = miss_table(call_distances(calls), calls.info)
    decode = lru_curves(calls)[DECODE]
    for slots in range(calls.info.n_expert + 1):
        assert table[slots].tolist() == np.bincount(replay(calls, slots), minlength=table.shape[1]).tolist()
    assert (table @ np.arange(table.shape[1])).tolist() == (decode.accesses - decode.hits).tolist()


@settings(max_examples=60)
@given(st.lists(random_layer(), min_size=1, max_size=1))
def test_the_halves_add_up_to_the_whole(runs: list[LayerCalls]) -> None:
    (calls,) = runs
    parts = decode_misses(calls)
    assert parts.whole.tolist() == miss_table(call_distances(calls), calls.info).tolist()
    assert sum(parts.tokens) == int(calls.rows_per_call[calls.phase == DECODE].sum())


def run_of(tokens: int, seed: int, *, width: int = 1) -> LayerCalls:
    rows = draw_rows(np.random.default_rng(seed), tokens * width, 8, 2).tolist()
    calls: list[Call] = [(DECODE, rows[at : at + width]) for at in range(0, len(rows), width)]
    return layer_calls(calls, 8, 2)


def test_runs_are_kept_whole_where_there_are_several() -> None:
    runs = [decode_misses(run_of(10, 1)), decode_misses(run_of(0, 2)), decode_misses(run_of(7, 3, width=2))]
    pooled = pool(runs)
    assert (pooled.split, pooled.tokens) == ("runs", (10, 14))
    assert pooled.tables.shape == (2, 9, 5)
    assert (pooled.tables[0][:, :3] == runs[0].whole).all()
    assert (pooled.tables[1] == runs[2].whole).all()
    assert pool(runs[:2]) is runs[0]


@settings(max_examples=60)
@given(random_layer())
def test_a_table_survives_json(calls: LayerCalls) -> None:
    parts = decode_misses(calls)
    again = misses_from_json(misses_to_json(parts), calls.info)
    width = again.tables.shape[2]
    assert (again.split, again.tokens) == (parts.split, parts.tokens)
    assert (again.tables == parts.tables[:, :, :width]).all()
    assert not parts.tables[:, :, width:].any()


INFO = TraceLayer(0, 8, 2, None)
GOOD: dict[str, Any] = misses_to_json(decode_misses(run_of(12, 4)))


def put(path: list[Any], value: Any) -> dict[str, Any]:
    body: Any = copy.deepcopy(GOOD)
    at = body
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return body  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        put(["split"], "by hand"),
        put(["parts"], GOOD["parts"][:1]),
        put(["parts", 0], 3),
        put(["parts", 0, "tokens"], 1),
        put(["parts", 0, "tokens"], -1),
        put(["parts", 0, "calls"], []),
        put(["parts", 0, "calls"], [3] * 9),
        put(["parts", 0, "calls", 2], [1]),
        put(["parts", 0, "calls", 2, 0], True),
        put(["parts", 0, "calls", 2, 0], -1),
        put(["parts", 0, "calls", 2, 0], 1.5),
        put(["parts", 0, "calls", 2, 0], 1 << 62),
        put(["parts", 0, "calls", 0], [6, 0, 0]),  # fewer misses than with more slots
    ],
)
def test_a_table_that_cannot_be_is_refused(body: Any) -> None:
    misses_from_json(GOOD, INFO)
    with pytest.raises((ValueError, KeyError)):
        misses_from_json(body, INFO)


@pytest.mark.parametrize("body", [None, [0, 1], [0, 1, 2, 3, 4, 5, 6, 7, 6], [1] * 9, [0] * 8 + [0.5], [0] * 8 + [True]])
def test_hits_that_cannot_be_are_refused(body: Any) -> None:
    assert belady_from_json(list(range(9)), INFO).tolist() == list(range(9))
    with pytest.raises(ValueError, match=r"numbers|number of hits|fall"):
        belady_from_json(body, INFO)


@settings(max_examples=60)
@given(st.lists(random_layer(), min_size=1, max_size=3))
def test_drawn_steps_have_each_layers_misses_at_every_size(layers: list[LayerCalls]) -> None:
    tables = [miss_table(call_distances(c), c.info) for c in layers]
    steps = drawn_steps([t.astype(np.float64) for t in tables], 1)
    calls = [int(t[0].sum()) for t in tables]
    for slots in range(10):
        misses = steps.misses(np.full(len(layers), slots))
        assert misses.shape == (max(calls), len(layers))
        for i, table in enumerate(tables):
            row = table[min(slots, len(table) - 1)].copy()
            row[0] += max(calls) - calls[i]  # steps in which the layer has no call
            if slots < len(table):
                assert np.bincount(misses[:, i], minlength=len(row)).tolist() == row.tolist()
