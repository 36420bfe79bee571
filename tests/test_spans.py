"""A file as spans: they tile it, and however it is read the pieces rebuild every span."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.errors import DamagedBundleError
from bel.formats.experts_file import PAGE_BYTES, BlobPart, LayerLayout, blob_layout
from bel.formats.units import MIB
from bel.repack.spans import GAP_STEP_BYTES, Kind, Placed, Span, SpanWalk, experts_spans, gguf_spans
from refused import refusal


@st.composite
def ggufs(draw: st.DrawFn) -> tuple[int, list[Placed], int]:
    """(header bytes, placed tensors in any order, file bytes); tensors may be empty and gaps may pass a MiB."""
    header = draw(st.integers(24, 4000))
    at, placed = header, []
    sizes = draw(
        st.lists(st.tuples(st.integers(0, 5) | st.integers(0, 2 * MIB), st.integers(0, 5), st.integers(1, 90)), max_size=8)
    )
    for number, (gap, parts, part_bytes) in enumerate(sizes):
        at += gap
        ne = draw(
            st.sampled_from([(parts * part_bytes,), (part_bytes, 1, parts), (1, 1, parts, part_bytes), (3, 1, parts or 1)])
        )
        size = parts * part_bytes
        placed.append(Placed(number, ne, at, size))
        at += size
    return header, draw(st.permutations(placed)), at + draw(st.integers(0, 3 * MIB))


@st.composite
def layers(draw: st.DrawFn) -> tuple[list[LayerLayout], int]:
    """(the layers of one experts file in any order, file bytes)."""
    at, made, tensor = PAGE_BYTES, [], 0
    for number in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(st.integers(1, 9000), min_size=1, max_size=3))
        offsets, stride = blob_layout(sizes)
        parts = tuple(BlobPart("up", tensor + i, o, s) for i, (o, s) in enumerate(zip(offsets, sizes, strict=True)))
        tensor += len(parts)
        made.append(LayerLayout(number, draw(st.integers(1, 4)), None, False, 0, at, stride, parts))
        at += made[-1].size_bytes
    return draw(st.permutations(made)), at


def tiles(spans: Iterable[Span], file_bytes: int) -> list[Span]:
    """`spans`, once it is sure that they cover the file without hole or overlap."""
    listed, at = list(spans), 0
    for span in listed:
        assert (span.start_bytes, span.size_bytes >= 0) == (at, True)
        at += span.size_bytes
    assert at == file_bytes
    return listed


@given(ggufs())
def test_spans_tile_a_gguf(file: tuple[int, list[Placed], int]) -> None:
    header, placed, size = file
    spans = tiles(gguf_spans(header, placed, size), size)
    assert spans[0] == Span(Kind.HEADER, 0, header)
    for tensor in placed:
        mine = [s for s in spans if s.kind is Kind.SLICE and s.tensor == tensor.tensor]
        assert [s.part for s in mine] == list(range(len(mine)))
        assert mine[0].start_bytes == tensor.start_bytes
        assert sum(s.size_bytes for s in mine) == tensor.size_bytes
        assert len({s.size_bytes for s in mine}) == 1
    for gap in (s for s in spans if s.kind is Kind.GAP):
        first, last = gap.start_bytes, gap.start_bytes + gap.size_bytes - 1
        assert first // GAP_STEP_BYTES == last // GAP_STEP_BYTES


@given(layers())
def test_spans_tile_an_experts_file(file: tuple[list[LayerLayout], int]) -> None:
    listed, size = file
    spans = tiles(experts_spans(listed, size), size)
    assert spans[0] == Span(Kind.HEADER, 0, PAGE_BYTES)
    slices = {(s.tensor, s.part): (s.start_bytes, s.size_bytes) for s in spans if s.kind is Kind.SLICE}
    assert slices == {
        (part.tensor, expert): (layer.part_offset(expert, part), part.size_bytes)
        for layer in listed
        for expert in range(layer.n_expert)
        for part in layer.parts
    }


@settings(max_examples=50)
@given(ggufs() | layers().map(lambda f: (PAGE_BYTES, f[0], f[1])), st.data())
def test_pieces_rebuild_every_span(file: tuple[int, list[Placed] | list[LayerLayout], int], data: st.DataObject) -> None:
    header, content, size = file
    is_experts = bool(content) and isinstance(content[0], LayerLayout)
    spans = list(experts_spans(content, size) if is_experts else gguf_spans(header, content, size))  # type: ignore[arg-type]
    walk, at, rebuilt, finished = SpanWalk(spans), 0, dict.fromkeys(range(len(spans)), 0), []
    number = {id(span): i for i, span in enumerate(spans)}
    while at < size:
        chunk = min(size - at, data.draw(st.integers(1, 100) | st.integers(1, 4 * MIB)) if at < 10**5 else 4 * MIB)
        within = 0
        for piece in walk.feed(chunk):
            index = number[id(piece.span)]
            assert piece.chunk_bytes == within
            assert piece.at_bytes == rebuilt[index] == at + within - piece.span.start_bytes
            rebuilt[index] += piece.size_bytes
            within += piece.size_bytes
            assert piece.completes is (rebuilt[index] == piece.span.size_bytes)
            if piece.completes:
                finished.append(index)
        assert within == chunk
        at += chunk
    assert finished == list(range(len(spans)))
    assert list(rebuilt.values()) == [s.size_bytes for s in spans]


def test_an_overlap_is_damage() -> None:
    placed = [Placed(0, (10,), 100, 10), Placed(1, (10,), 105, 10)]
    error = refusal(lambda: list(gguf_spans(100, placed, 200)), DamagedBundleError)
    assert (error.cause, error.offset_bytes, error.exit_code) == ("two tensors of the manifest overlap", 110, 4)
    refusal(lambda: list(gguf_spans(101, placed[:1], 200)), DamagedBundleError)
    refusal(lambda: list(gguf_spans(100, placed[:1], 109)), DamagedBundleError)


@pytest.mark.parametrize("size", [0, 7])
def test_empty_tensors_share_a_place(size: int) -> None:
    placed = [Placed(0, (size,), 32, size), Placed(1, (0,), 32, 0), Placed(2, (0, 3), 32 + size, 0)]
    spans = tiles(gguf_spans(32, placed, 32 + size), 32 + size)
    assert sorted(s.tensor for s in spans if s.kind is Kind.SLICE) == [0, 1, 2]
    assert sum(p.completes for p in SpanWalk(spans).feed(32 + size)) == 4
