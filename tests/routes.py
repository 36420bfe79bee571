"""Calls of a router for tests: made by hand, or drawn with a bias towards some experts and towards those just used."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import permutations
from pathlib import Path

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from bel.formats.trace import DECODE, PROMPT, TraceWriter
from bel.formats.trace_calls import LayerCalls
from bel.formats.trace_header import TraceHeader, TraceLayer

Call = tuple[int, Sequence[Sequence[int]]]  # (phase, rows of ids)


def some_row(n_expert: int, top_k: int) -> st.SearchStrategy[list[int]]:
    """Any row of ids, in one draw: hypothesis takes ten times as long for a permutation."""
    return st.sampled_from(_rows(n_expert, top_k)).map(list)


@cache
def _rows(n_expert: int, top_k: int) -> list[tuple[int, ...]]:
    return list(permutations(range(n_expert), top_k))


def layer_calls(calls: Sequence[Call], n_expert: int, top_k: int, *, token: Sequence[int] | None = None) -> LayerCalls:
    """The calls of one layer; tokens count on from 0 unless they are given."""
    rows = [row for _, group in calls for row in group]
    return LayerCalls(
        info=TraceLayer(0, n_expert, top_k, None),
        order=np.arange(len(calls)),
        phase=np.array([phase for phase, _ in calls], np.uint8),
        ubatch=np.arange(len(calls)),
        row_start=np.cumsum([0, *(len(group) for _, group in calls)]).astype(np.int64),
        token=np.arange(len(rows)) if token is None else np.array(token, np.int64),
        ids=np.array(rows, np.uint16).reshape(-1, top_k),
        weights=None,
        time_ns=None,
    )


def draw_rows(random: np.random.Generator, count: int, n_expert: int, top_k: int, hot: int = 0) -> npt.NDArray[np.uint16]:
    """(count, top_k) ids: half of the time drawn among the quarter of the experts from `hot` on, and often used again."""
    weight = np.ones(n_expert)
    weight[(hot + np.arange(max(n_expert // 4, 1))) % n_expert] = 4
    rows = []
    for _ in range(count):
        odds = weight.copy()
        if rows:
            odds[rows[-1]] *= 3
        rows.append(random.choice(n_expert, top_k, replace=False, p=odds / odds.sum()))
    return np.array(rows, np.uint16).reshape(-1, top_k)


def write_trace(
    path: Path,
    workload: str,
    prompts: Sequence[tuple[int, int]],
    *,
    layers: Sequence[TraceLayer] = (TraceLayer(0, 16, 2, 1000), TraceLayer(1, 16, 2, 1000)),
    hot: int = 0,
    seed: int = 0,
    model: str = "random",
    ubatch: int = 8,
) -> Path:
    """A trace of `prompts`, each with (tokens of prompt, tokens of decode)."""
    random = np.random.default_rng(seed)
    number = 0
    with TraceWriter(path, TraceHeader(model, "qwen3moe", "f1", tuple(layers), workload), sync=False) as writer:
        for prompt, decode in prompts:
            sizes = [min(ubatch, prompt - at) for at in range(0, prompt, ubatch)]
            calls = [(PROMPT, n) for n in sizes] + [(DECODE, 1)] * decode
            at = 0
            for phase, n in calls:
                for info in layers:
                    ids = draw_rows(random, n, info.n_expert, info.top_k, hot)
                    tokens = np.arange(at, at + n)
                    writer.append(phase=phase, ubatch=number, layer=info.layer, tokens=tokens, ids=ids)
                at, number = at + n, number + 1
    return path
