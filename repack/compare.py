"""`verify --source`: a bundle against the original files, byte for byte, without writing anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bel.formats.bundle import Bundle
from bel.formats.errors import printable
from bel.formats.gguf_model import GgufModel
from bel.formats.manifest import SourceRow, TensorRow
from bel.repack.digests import SliceDigests
from bel.repack.kept import KeptBytes
from bel.repack.spans import Kind, Placed, gguf_spans
from bel.repack.verify import Report
from bel.repack.walk import Advance, FileWalk, counter, source_shrank


def compare_source(bundle: Bundle, model: GgufModel, report: Report, progress: Callable[[str, int, int], None]) -> None:
    """Add to `report` every difference between the files of `model` and what the bundle says of its source.

    The bundle itself must have been verified: its digests and kept bytes stand for its content here.
    """
    manifest = bundle.manifest
    have = [header.file_bytes for header in model.files]
    want = [source.size_bytes for source in manifest.sources]
    if have != want:
        shown = ", ".join(printable(str(header.path)) for header in model.files)
        report.problem(f"{shown}: not the source of this bundle: {have} bytes, expected {want}")
        return
    advance = counter(progress, "compare", sum(have))
    for number, (header, source) in enumerate(zip(model.files, manifest.sources, strict=True)):
        rows = {i: t for i, t in enumerate(manifest.tensors) if t.source == number}
        sha = _compare_file(bundle, header.path, source, rows, report, advance)
        if source.sha256 is not None and sha != source.sha256:
            report.problem(
                f"{printable(str(header.path))}: sha256 {sha} is not that of the file that was converted, {source.sha256}"
            )


def _compare_file(
    bundle: Bundle, path: Path, source: SourceRow, rows: dict[int, TensorRow], report: Report, advance: Advance
) -> str | None:
    placed = [Placed(i, t.ne, t.source_offset_bytes, t.size_bytes) for i, t in rows.items()]
    spans = gguf_spans(source.kept[0][1] if source.kept else 0, placed, source.size_bytes)
    kept, digests = KeptBytes(bundle.path(source.header_file), source), SliceDigests()
    shown = printable(str(path))
    with FileWalk(path, source.size_bytes, spans, advance, sha256=source.sha256 is not None, short_read=source_shrank) as walk:
        for piece, data in walk:
            if piece.span.kind is Kind.SLICE:
                digests.add(piece, data)
                row = rows[piece.span.tensor]
                done = piece.completes and digests.complete(piece.span.tensor, row.ne, row.size_bytes)
                if done and digests.tensor(piece.span.tensor).hex() != row.digest:
                    report.problem(f"{shown}: tensor {printable(row.name)} differs from the bundle")
                continue
            start = piece.span.start_bytes + piece.at_bytes
            if (bytes(piece.size_bytes) if data is None else bytes(data)) != kept.take(start, piece.size_bytes):
                report.problem(f"{shown}: {piece.span.kind.value} bytes differ from the bundle (at byte {start})")
    return walk.sha256
