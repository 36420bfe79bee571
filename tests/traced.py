"""Calls to write into a trace, and whether a trace holds them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bel.formats.trace import DECODE, TraceHeader, TraceLayer, TraceWriter
from bel.formats.trace_calls import Trace

HEADER = TraceHeader(
    model_name="tiny",
    arch="qwen3moe",
    fingerprint="f1",
    layers=(TraceLayer(0, 8, 2, 4096), TraceLayer(3, 300, 3, None)),
    workload="code",
    prompts=("aa", "bb"),
    engine="test",
    engine_build="b1",
    sampling={"temperature": 0, "seed": 1},
)


@dataclass
class Call:
    phase: int
    ubatch: int
    layer: int
    tokens: np.ndarray
    ids: np.ndarray
    weights: np.ndarray | None = None
    time_ns: int | None = None


def calls_of(seed: int, count: int, header: TraceHeader = HEADER) -> list[Call]:
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        row = header.layers[int(rng.integers(len(header.layers)))]
        phase = int(rng.integers(2))
        n = 1 if phase == DECODE else int(rng.integers(1, 5))
        ids = rng.integers(0, row.n_expert, (n, row.top_k)).astype(np.uint16)
        weights = rng.random((n, row.top_k)).astype(np.float16) if header.has_weights else None
        time = int(rng.integers(10**7)) if header.has_times and i % 3 else None
        made.append(Call(phase, i // 3, row.layer, np.arange(i, i + n), ids, weights, time))
    return made


def write(path: Path, calls: list[Call], header: TraceHeader = HEADER, flush_every: int = 0, **options: Any) -> Path:
    with TraceWriter(path, header, sync=False, **options) as writer:
        append(writer, calls, flush_every)
    return path


def append(writer: TraceWriter, calls: list[Call], flush_every: int = 0) -> None:
    for i, c in enumerate(calls, 1):
        writer.append(
            phase=c.phase, ubatch=c.ubatch, layer=c.layer, tokens=c.tokens, ids=c.ids, weights=c.weights, time_ns=c.time_ns
        )
        if flush_every and i % flush_every == 0:
            writer.flush()


def assert_holds(trace: Trace, calls: list[Call]) -> None:
    """The trace is these calls, no more and no less."""
    assert sum(len(x.phase) for x in trace.layers) == len(calls)
    for layer in trace.layers:
        mine = [(i, c) for i, c in enumerate(calls) if c.layer == layer.info.layer]
        assert layer.order.tolist() == [i for i, _ in mine]
        assert layer.phase.tolist() == [c.phase for _, c in mine]
        assert layer.ubatch.tolist() == [c.ubatch for _, c in mine]
        assert layer.rows_per_call.tolist() == [len(c.ids) for _, c in mine]
        assert layer.token.tolist() == [t for _, c in mine for t in c.tokens.tolist()]
        assert layer.ids.tolist() == [row for _, c in mine for row in c.ids.tolist()]
        if layer.weights is not None:
            wanted = [c.weights for _, c in mine if c.weights is not None]
            assert layer.weights.tolist() == [row for w in wanted for row in w.tolist()]
        if layer.time_ns is not None:
            assert layer.time_ns.tolist() == [-1 if c.time_ns is None else c.time_ns for _, c in mine]
