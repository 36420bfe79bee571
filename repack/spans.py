"""A file as a run of spans without hole or overlap: headers, slices of tensors, and gaps.  Pure.

The same walk serves the conversion (over source files), `verify` (over the bundle's files) and `restore`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bel.formats.digest import slice_count
from bel.formats.errors import DamagedBundleError
from bel.formats.experts_file import PAGE_BYTES, LayerLayout
from bel.formats.units import MIB


class Kind(enum.Enum):
    """What a span holds."""

    HEADER = "header"
    SLICE = "slice"
    GAP = "gap"


@dataclass(frozen=True, slots=True)
class Span:
    """[start, start + size) of a file.  For a SLICE: `tensor` is the table index, `part` the slice along ne[2]."""

    kind: Kind
    start_bytes: int
    size_bytes: int
    tensor: int = -1
    part: int = -1


@dataclass(frozen=True, slots=True)
class Piece:
    """The share of a span that lies in one chunk: `at_bytes` counts from the span's start, `chunk_bytes` from the chunk's."""

    span: Span
    at_bytes: int
    chunk_bytes: int
    size_bytes: int
    completes: bool


GAP_STEP_BYTES = MIB
"""Gaps are cut at multiples of this, so that which gap bytes are kept does not depend on how a file was read."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor's bytes in the file that is walked."""

    tensor: int
    ne: tuple[int, ...]
    start_bytes: int
    size_bytes: int


def gguf_spans(header_bytes: int, placed: Iterable[Placed], file_bytes: int) -> Iterator[Span]:
    """The spans of a GGUF: header, the slices of its tensors by place, and what lies between and behind."""
    yield Span(Kind.HEADER, 0, header_bytes)
    at = header_bytes
    for tensor in sorted(placed, key=lambda t: (t.start_bytes, t.size_bytes)):
        yield from _gap(at, tensor.start_bytes)
        count = slice_count(tensor.ne, tensor.size_bytes)
        size = tensor.size_bytes // count
        for part in range(count):
            yield Span(Kind.SLICE, tensor.start_bytes + part * size, size, tensor.tensor, part)
        at = tensor.start_bytes + tensor.size_bytes
    yield from _gap(at, file_bytes)


def experts_spans(layers: Iterable[LayerLayout], file_bytes: int) -> Iterator[Span]:
    """The spans of one experts file, for the layers that it holds: header page, parts of blobs, padding."""
    yield Span(Kind.HEADER, 0, PAGE_BYTES)
    at = PAGE_BYTES
    for layer in sorted(layers, key=lambda x: x.offset_bytes):
        for expert in range(layer.n_expert):
            for part in layer.parts:
                start = layer.part_offset(expert, part)
                yield from _gap(at, start)
                yield Span(Kind.SLICE, start, part.size_bytes, part.tensor, expert)
                at = start + part.size_bytes
    yield from _gap(at, file_bytes)


def _gap(start: int, end: int) -> Iterator[Span]:
    if end < start:
        raise DamagedBundleError("two tensors of the manifest overlap", offset_bytes=start)
    while start < end:
        step = min(end, (start // GAP_STEP_BYTES + 1) * GAP_STEP_BYTES)
        yield Span(Kind.GAP, start, step - start)
        start = step


class SpanWalk:
    """Cuts a sequence of chunks, which cover a file from its start without a break, into pieces of its spans."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._spans = iter(spans)
        self._span = next(self._spans, None)
        self._offset = 0

    def feed(self, size_bytes: int) -> Iterator[Piece]:
        """The pieces of the next `size_bytes` bytes.  Consume all of them before the next call."""
        start, end = self._offset, self._offset + size_bytes
        while self._span is not None and (self._offset < end or self._span.size_bytes == 0):
            span = self._span
            take = min(span.start_bytes + span.size_bytes, end) - self._offset
            completes = self._offset + take == span.start_bytes + span.size_bytes
            piece = Piece(span, self._offset - span.start_bytes, self._offset - start, take, completes)
            self._offset += take
            if completes:
                self._span = next(self._spans, None)
            yield piece
        self._offset = end
