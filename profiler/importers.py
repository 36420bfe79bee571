"""Other tools' router traces, brought into ours: what the importers share.

Each format has a module that reads a file into an Imported: rows of the router, and what the file says of its model.
Whatever does not fit is refused with file and line; what a file does not say is inferred, and noted.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bel.formats.errors import BadInputError
from bel.formats.trace import TraceHeader, TraceLayer, TraceWriter
from bel.formats.trace_header import MAX_EXPERTS

MAX_LINE_BYTES = 1 << 20
_INTEGER = re.compile(r"\s*(-?\d{1,18})\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a text file, without its end.  `is_ended` is false for a last line that has no line end."""

    number: int
    text: str
    is_ended: bool


@dataclass(frozen=True, slots=True)
class Origin:
    """What a file says of its model and run.  None and "" where it does not."""

    model_name: str = ""
    arch: str = ""
    fingerprint: str = ""
    engine: str = ""
    layers: tuple[int, ...] | None = None
    n_expert: int | None = None
    top_k: int | None = None
    expert_bytes: dict[int, int] = field(default_factory=dict)


class LayerRows:
    """The rows of one layer as columns, in the order of the file: `ids` and `weights` are flat, k a row."""

    __slots__ = ("ids", "phase", "token", "top_k", "ubatch", "weights")

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        self.token, self.ubatch = array("q"), array("q")
        self.phase, self.ids, self.weights = array("B"), array("H"), array("f")


MAX_LAYER = 65535  # far above any model; a damaged number is far above this


@dataclass(slots=True)
class Imported:
    """The rows of a file by layer, with its origin and notes.  Rows of one (ubatch, layer) are one call.

    Ubatches are numbered by the importer so that they rise in the order in which the model computed them.
    """

    path: Path
    origin: Origin
    layers: dict[int, LayerRows] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    has_weights: bool = False
    repeats: int = 0

    def add(
        self, where: str, *, layer: int, token: int, phase: int, ubatch: int, ids: list[int], weights: list[float] | None = None
    ) -> None:
        """Add a row.  `where` names its place in messages ("line 7").  Raises BadInputError for a row that cannot be."""
        rows = self.layers.get(layer)
        if rows is None:
            rows = self._open_layer(where, layer, ids)
        if len(ids) != rows.top_k:
            raise self.bad(where, f"layer {layer} has a row of {len(ids)} experts", len(ids), f"top_k {rows.top_k}")
        limit = self.origin.n_expert or MAX_EXPERTS
        if not 0 <= min(ids) <= max(ids) < limit:
            wrong = next(i for i in ids if not 0 <= i < limit)
            raise self.bad(where, f"layer {layer} names an expert that is out of range", wrong, f"0 to {limit - 1}")
        if token < 0:
            raise self.bad(where, "the token is negative", token, "0 or more")
        self.repeats += len(set(ids)) < len(ids)
        rows.token.append(token)
        rows.ubatch.append(ubatch)
        rows.phase.append(phase)
        rows.ids.extend(ids)
        if weights is not None:
            rows.weights.extend(weights)

    def _open_layer(self, where: str, layer: int, ids: list[int]) -> LayerRows:
        declared = self.origin.layers
        if layer > MAX_LAYER:
            raise self.bad(where, f"layer {layer} cannot be", layer, f"at most {MAX_LAYER}")
        if layer < 0 or (declared is not None and layer not in declared):
            raise self.bad(where, f"layer {layer} is not one of the MoE layers that the header lists", layer, declared)
        if not ids:
            raise self.bad(where, f"layer {layer} has a row without experts", "no ids", "at least one")
        rows = self.layers[layer] = LayerRows(self.origin.top_k or len(ids))
        return rows

    def bad(self, where: str, cause: str, found: object = None, expected: object = None) -> BadInputError:
        """The refusal of a row."""
        return BadInputError(f"{where}: {cause}", path=str(self.path), found=found, expected=expected)

    def header(self, workload: str) -> TraceHeader:
        """The header of the trace.  What had to be inferred is noted.  Raises BadInputError where nothing tells the layers."""
        origin = self.origin
        numbers = sorted(self.layers) if origin.layers is None else list(origin.layers)
        if not numbers or (not self.layers and not (origin.n_expert and origin.top_k)):
            raise BadInputError("the file holds no rows, and no header that tells layers and experts", path=str(self.path))
        n_expert = origin.n_expert or 1 + max(max(rows.ids) for rows in self.layers.values())
        inferred = [
            name
            for name, value in (("layers", origin.layers), ("n_expert", origin.n_expert), ("top_k", origin.top_k))
            if value is None
        ]
        if inferred:
            self.notes.append(f"the file does not give {', '.join(inferred)}: inferred from its rows (n_expert {n_expert})")
        if self.repeats:
            self.notes.append(f"{self.repeats} rows name an expert twice; a call counts it as one access")
        some_k = next((rows.top_k for rows in self.layers.values()), origin.top_k or 1)
        layers = [
            TraceLayer(n, n_expert, self.layers[n].top_k if n in self.layers else some_k, origin.expert_bytes.get(n))
            for n in numbers
        ]
        return TraceHeader(
            model_name=origin.model_name,
            arch=origin.arch,
            fingerprint=origin.fingerprint,
            layers=tuple(layers),
            workload=workload,
            engine=origin.engine,
            has_weights=self.has_weights,
        )

    def write(self, path: Path, header: TraceHeader) -> None:
        """Write the rows as a new trace: ubatch by ubatch, in each the layers in ascending order."""
        layers = {number: _Grouped(rows) for number, rows in sorted(self.layers.items())}
        turns = sorted((ubatch, number, i) for number, g in layers.items() for i, ubatch in enumerate(g.ubatches.tolist()))
        with TraceWriter(path, header, sync=False) as writer:
            for ubatch, number, i in turns:
                group = layers[number]
                rows = slice(int(group.start[i]), int(group.start[i + 1]))
                writer.append(
                    phase=int(group.phase[rows.start]),
                    ubatch=ubatch,
                    layer=number,
                    tokens=group.token[rows],
                    ids=group.ids[rows],
                    weights=group.weights[rows] if self.has_weights else None,
                )


class _Grouped:
    """The rows of a layer with those of one ubatch together, in the order of the file."""

    def __init__(self, rows: LayerRows) -> None:
        ubatch = np.frombuffer(rows.ubatch, np.int64)
        order = np.argsort(ubatch, kind="stable")
        self.ubatches, first = np.unique(ubatch[order], return_index=True)
        self.start: npt.NDArray[np.int64] = np.append(first, len(ubatch)).astype(np.int64)
        self.token = np.frombuffer(rows.token, np.int64)[order]
        self.phase = np.frombuffer(rows.phase, np.uint8)[order]
        self.ids = np.frombuffer(rows.ids, np.uint16).reshape(-1, rows.top_k)[order]
        weights = np.frombuffer(rows.weights, np.float32).astype(np.float16)
        self.weights = weights.reshape(-1, rows.top_k)[order] if len(weights) else weights


def text_lines(path: Path) -> Iterator[Line]:
    """The lines of a UTF-8 file, with or without a byte order mark and carriage returns.  Raises BadInputError for others."""
    with path.open("rb") as file:
        number = 0
        while data := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            is_ended = data.endswith(b"\n")
            if len(data) > MAX_LINE_BYTES:
                raise BadInputError(f"line {number}: it is longer than {MAX_LINE_BYTES} bytes", path=str(path))
            try:
                text = data.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise BadInputError(f"line {number}: it is not UTF-8 text", path=str(path)) from None
            yield Line(number, text.rstrip("\r\n"), is_ended)


def parse_integer(text: str) -> int | None:
    """A plain decimal integer, or None."""
    match = _INTEGER.fullmatch(text)
    return int(match[1]) if match else None
