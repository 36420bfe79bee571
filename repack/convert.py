"""The conversion: one sequential read of the source, every byte hashed and written as it passes, then one rename."""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bel.formats.atomic import fsync_folder, write_file
from bel.formats.bundle import expected_experts_header, open_bundle
from bel.formats.digest import bytes_digest
from bel.formats.errors import BadInputError, DamagedBundleError
from bel.formats.experts_file import PartPlaces, pack_index
from bel.formats.gguf_header import GgufHeader
from bel.formats.gguf_model import GgufModel
from bel.formats.manifest import DENSE, EXPERTS, MANIFEST_NAME, FileRow, Manifest, SourceRow, TensorRow, encode
from bel.formats.staging import StagingFolder
from bel.repack.digests import GapCollector, SliceDigests
from bel.repack.kept import KeptWriter
from bel.repack.layout import Layout, dense_header
from bel.repack.sink import Sink
from bel.repack.spans import Kind, Piece, Placed, gguf_spans
from bel.repack.stream import MAX_HASHED_HOLE_BYTES, sparse_bytes
from bel.repack.target import check_space, check_target, staging_path
from bel.repack.verify import Report, verify_bundle
from bel.repack.walk import Advance, FileWalk, counter, source_shrank

Progress = Callable[[str, int, int], None]
"""`progress(phase, bytes done, bytes in all)`."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion did.  `seconds` is without the verification, `verify_seconds` is None where there was none."""

    manifest: Manifest
    bundle: Path
    seconds: float
    verify_seconds: float | None
    bytes_read: int
    bytes_written: int


@dataclass(slots=True)
class _Run:
    """The state of a conversion while it runs."""

    model: GgufModel
    layout: Layout
    sink: Sink
    advance: Advance
    places: PartPlaces
    digests: SliceDigests = field(default_factory=SliceDigests)
    bytes_read: int = 0


def convert(model: GgufModel, layout: Layout, target: Path, *, force: bool, check: bool, progress: Progress) -> Converted:
    """Make the bundle `target`.  The caller has checked the target; nothing is left of it after an error.

    Raises BadInputError where the source changes meanwhile, MachineError and OSError for the machine's refusals,
    DamagedBundleError where the written bundle does not verify.
    """
    began = time.monotonic()
    holes = [sparse_bytes(header.path, header.file_bytes) for header in model.files]
    check_space(target.parent, space_needed(model, layout))
    with StagingFolder(staging_path(target)) as staging:
        sink = Sink(staging.path)
        try:
            advance = counter(progress, "repack", sum(header.file_bytes for header in model.files))
            run = _Run(model, layout, sink, advance, PartPlaces(layout.layers))
            manifest = _write_files(run, staging.path, holes)
            sink.sync()
        finally:
            sink.close()
        fsync_folder(staging.path / "source")
        write_file(staging.path / MANIFEST_NAME, encode(manifest))
        fsync_folder(staging.path)
        seconds = time.monotonic() - began
        verify_seconds = _verify(staging.path, progress) if check else None
        check_target(target, [header.path for header in model.files], force=force)  # hours may have passed since the first look
        staging.publish(target, replace=force, is_last=True)
    return Converted(manifest, target, seconds, verify_seconds, run.bytes_read, sink.bytes_written)


def space_needed(model: GgufModel, layout: Layout) -> int:
    """Bytes that the bundle will take: its files, less the holes of tensors, which stay holes."""
    total = layout.size_bytes + sum(header.data_start_bytes for header in model.files)
    for number, header in enumerate(model.files):
        places = sorted((t.start_bytes, t.start_bytes + t.size_bytes) for t in model.tensors if t.source == number)
        total -= sparse_bytes(header.path, header.file_bytes, places)
    return total


def _verify(folder: Path, progress: Progress) -> float:
    began = time.monotonic()
    report: Report = verify_bundle(open_bundle(folder), quick=False, progress=progress)
    if report.problems:
        raise DamagedBundleError(
            f"what was written does not read back as it was written: {report.problems[0]}",
            hint="The disk or the memory of this machine is at fault; nothing was kept",
        )
    return time.monotonic() - began


def _write_files(run: _Run, folder: Path, holes: list[int]) -> Manifest:
    layout, sink = run.layout, run.sink
    sink.create(layout.dense_name, layout.dense.size_bytes)
    if layout.ple:
        sink.create(layout.ple_name, layout.ple.size_bytes)
    for name, size in zip(layout.experts_names, layout.experts_bytes, strict=True):
        sink.create(name, size)
    os.mkdir(folder / "source")
    sources = tuple(_copy_source(run, number, folder, holes[number]) for number in range(len(run.model.files)))
    return _finish(run, sources)


def _copy_source(run: _Run, number: int, folder: Path, holes: int) -> SourceRow:
    """Read one source file once, and send every slice where it belongs."""
    header = run.model.files[number]
    name = header.path.name
    placed = [Placed(i, t.ne, t.start_bytes, t.size_bytes) for i, t in enumerate(run.model.tensors) if t.source == number]
    spans = gguf_spans(header.data_start_bytes, placed, header.file_bytes)
    gaps = GapCollector()
    kept = KeptWriter(folder / "source" / f"{name}.hdr.zst")
    try:
        kept.add(0, header.raw)
        with FileWalk(
            header.path, header.file_bytes, spans, run.advance, sha256=holes <= MAX_HASHED_HOLE_BYTES, short_read=source_shrank
        ) as walk:
            before = os.fstat(walk.fd)
            for piece, data in walk:
                if piece.span.kind is Kind.SLICE:
                    _place_slice(run, piece, data)
                elif piece.span.kind is Kind.GAP:
                    left = gaps.add(piece, data)
                    if left is not None:
                        kept.add(piece.span.start_bytes, left)
                elif not _is_header(header, piece, data):
                    raise _changed(header.path)
            after = os.fstat(walk.fd)
        size, digest = kept.finish()
    finally:
        kept.close()
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns) or after.st_size != header.file_bytes:
        raise _changed(header.path)
    run.bytes_read += walk.bytes_read
    run.sink.bytes_written += size
    return SourceRow(name, header.file_bytes, walk.sha256, holes, f"source/{name}.hdr.zst", size, digest, tuple(kept.ranges))


def _is_header(header: GgufHeader, piece: Piece, data: memoryview | None) -> bool:
    """Whether a piece of the header still reads as it was scanned.  A long run of zeros in it may be a hole."""
    scanned = header.raw[piece.at_bytes : piece.at_bytes + piece.size_bytes]
    return not any(scanned) if data is None else data == scanned


def _changed(path: Path) -> BadInputError:
    return BadInputError("the file changed while it was read", path=str(path), hint="Wait until its download or copy is done")


def _place_slice(run: _Run, piece: Piece, data: memoryview | None) -> None:
    """Hash a piece of a slice and write it to its place; a hole stays one."""
    run.digests.add(piece, data)
    if data is None:
        return
    layout, index = run.layout, piece.span.tensor
    dest = layout.destinations[index]
    if dest.dest == EXPERTS:
        layer, part = run.places.of(index)
        at = layer.part_offset(piece.span.part, part) + piece.at_bytes
        run.sink.write(layout.experts_names[layer.shard], data, at)
        return
    at = dest.offset_bytes + piece.span.part * piece.span.size_bytes + piece.at_bytes
    run.sink.write(layout.dense_name if dest.dest == DENSE else layout.ple_name, data, at)


def _finish(run: _Run, sources: tuple[SourceRow, ...]) -> Manifest:
    """What can be written only when every byte was seen: digest table, headers, manifest."""
    model, layout, sink = run.model, run.layout, run.sink
    content = run.digests.content(model)
    index = pack_index(run.digests.index(layout.layers))
    sink.create(layout.index_name, len(index))
    sink.write(layout.index_name, index, 0)
    head = dense_header(model, layout, content)
    assert len(head) == layout.dense.data_start_bytes, "the digest does not change the header's length"
    sink.write(layout.dense_name, head, 0)
    ple = None
    if layout.ple:
        ple_head = layout.ple.header()
        sink.write(layout.ple_name, ple_head, 0)
        ple = FileRow(layout.ple_name, layout.ple.size_bytes, len(ple_head), bytes_digest(ple_head))
    index_digest = bytes_digest(index)
    manifest = Manifest(
        toolkit=importlib.metadata.version("bel-toolkit"),
        name=layout.name,
        arch=model.arch,
        model_name=model.first.text("general.name"),
        content_digest=content,
        sources=sources,
        tensors=tuple(_rows(run)),
        layers=layout.layers,
        dense=FileRow(layout.dense_name, layout.dense.size_bytes, len(head), bytes_digest(head)),
        ple=ple,
        index=FileRow(layout.index_name, len(index), len(index), index_digest),
        experts=tuple(
            FileRow(name, size, 0, bytes_digest(b""))
            for name, size in zip(layout.experts_names, layout.experts_bytes, strict=True)
        ),
    )
    for shard, name in enumerate(layout.experts_names):
        sink.write(name, expected_experts_header(manifest, shard), 0)
    return manifest


def _rows(run: _Run) -> Iterator[TensorRow]:
    for i, (tensor, dest) in enumerate(zip(run.model.tensors, run.layout.destinations, strict=True)):
        digest = run.digests.tensor(i).hex()
        yield TensorRow(
            tensor.name,
            tensor.type_id,
            tensor.ne,
            tensor.size_bytes,
            tensor.source,
            tensor.start_bytes,
            dest.dest,
            dest.offset_bytes,
            digest,
        )
