"""A whole trace as columns of numpy: for each layer its calls in time order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bel.formats.trace_block import Block, layer_extents
from bel.formats.trace_header import TraceHeader, TraceLayer
from bel.formats.trace_reader import TraceReader


@dataclass(frozen=True, slots=True)
class LayerCalls:
    """All calls of one layer, in time order (C calls, R rows, k = top_k).

    `order` (C,) i64 is each call's place among the calls of the whole run, `phase` (C,) u8, `ubatch` (C,) i64.  The rows of
    call c are `row_start[c]` to `row_start[c + 1]` (C + 1,) i64 of `token` (R,) i64, `ids` (R, k) u16 and `weights` (R, k) f16
    (None where there are none or where they were not asked for).  `time_ns` (C,) i64, -1 where not taken.
    """

    info: TraceLayer
    order: npt.NDArray[np.int64]
    phase: npt.NDArray[np.uint8]
    ubatch: npt.NDArray[np.int64]
    row_start: npt.NDArray[np.int64]
    token: npt.NDArray[np.int64]
    ids: npt.NDArray[np.uint16]
    weights: npt.NDArray[np.float16] | None
    time_ns: npt.NDArray[np.int64] | None

    @property
    def rows_per_call(self) -> npt.NDArray[np.int64]:
        """(C,) i64."""
        return np.diff(self.row_start)


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace.  `notes` say what is missing from it, if anything: they belong on stderr."""

    header: TraceHeader
    layers: tuple[LayerCalls, ...]
    notes: tuple[str, ...]

    @property
    def id_count(self) -> int:
        """Recorded expert ids."""
        return sum(x.ids.size for x in self.layers)


def read_trace(path: Path, *, weights: bool = False) -> Trace:
    """A whole trace as columns of each layer.  Raises BadInputError as TraceReader does."""
    with TraceReader(path) as reader:
        header = reader.header
        parts: list[list[LayerCalls]] = [[_no_calls(info, header, weights=weights)] for info in header.layers]
        calls = 0
        for block in reader.blocks(weights=weights):
            for place, part in _by_layer(block, header, calls):
                parts[place].append(part)
            calls += len(block.rows)
        notes = tuple(reader.notes)
    return Trace(header, tuple(_join(p) for p in parts), notes)


def _by_layer(block: Block, header: TraceHeader, first_call: int) -> Iterator[tuple[int, LayerCalls]]:
    """The calls of one block, layer by layer; `order` goes on from `first_call`."""
    by_place = np.argsort(block.place, kind="stable")
    edges = np.searchsorted(block.place[by_place], np.arange(len(header.layers) + 1))
    row_at, id_at = layer_extents(block, header)
    for place in np.unique(block.place):
        info = header.layers[place]
        calls = by_place[edges[place] : edges[place + 1]]
        rows, ids = slice(row_at[place], row_at[place + 1]), slice(id_at[place], id_at[place + 1])
        yield (
            int(place),
            LayerCalls(
                info=info,
                order=calls + first_call,
                phase=block.phase[calls],
                ubatch=block.ubatch[calls],
                row_start=_starts(block.rows[calls].astype(np.int64)),
                token=block.token[rows],
                ids=block.ids[ids].reshape(-1, info.top_k),
                weights=None if block.weights is None else block.weights[ids].reshape(-1, info.top_k),
                time_ns=None if block.times is None else block.times[calls],
            ),
        )


def _no_calls(info: TraceLayer, header: TraceHeader, *, weights: bool) -> LayerCalls:
    none = np.zeros(0, np.int64)
    return LayerCalls(
        info=info,
        order=none,
        phase=np.zeros(0, np.uint8),
        ubatch=none,
        row_start=np.zeros(1, np.int64),
        token=none,
        ids=np.zeros((0, info.top_k), np.uint16),
        weights=np.zeros((0, info.top_k), np.float16) if weights and header.has_weights else None,
        time_ns=none if header.has_times else None,
    )


def _join(parts: list[LayerCalls]) -> LayerCalls:
    weights = [x.weights for x in parts if x.weights is not None]
    times = [x.time_ns for x in parts if x.time_ns is not None]
    return LayerCalls(
        info=parts[0].info,
        order=np.concatenate([x.order for x in parts]),
        phase=np.concatenate([x.phase for x in parts]),
        ubatch=np.concatenate([x.ubatch for x in parts]),
        row_start=_starts(np.concatenate([x.rows_per_call for x in parts])),
        token=np.concatenate([x.token for x in parts]),
        ids=np.concatenate([x.ids for x in parts]),
        weights=np.concatenate(weights) if weights else None,
        time_ns=np.concatenate(times) if times else None,
    )


def _starts(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(rows)])
