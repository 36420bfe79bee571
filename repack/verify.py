"""Verification: read every byte of a bundle and compare it with what was written; and a bundle with its source."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bel.formats.atomic import named_errors, read_all, read_head
from bel.formats.bundle import Bundle, expected_experts_header, read_index, size_problem
from bel.formats.digest import (
    DIGEST_BYTES,
    SliceHasher,
    bytes_digest,
    content_digest,
    data_digest,
    is_zero,
    leaf_digest,
)
from bel.formats.errors import BelError, DamagedBundleError, printable
from bel.formats.experts_file import PAGE_BYTES, LayerLayout, PartPlaces, parts_in_order
from bel.formats.holes import extents
from bel.formats.manifest import DENSE, PLE, FileRow
from bel.repack.digests import SliceDigests
from bel.repack.kept import check_kept
from bel.repack.spans import Kind, Piece, Placed, Span, experts_spans, gguf_spans
from bel.repack.stream import CHUNK_BYTES
from bel.repack.walk import FileWalk

MAX_PROBLEMS = 200
QUICK_BLOBS = 32
_SAMPLE_SEED = 20261130


@dataclass(slots=True)
class Report:
    """The outcome of a verification.  `problems` are messages, at most MAX_PROBLEMS and a last line that counts the rest."""

    problems: list[str] = field(default_factory=list)
    blobs_checked: int = 0
    bytes_checked: int = 0
    dropped: int = 0

    @property
    def count(self) -> int:
        """Problems found, those that are not listed included."""
        return len(self.problems) - (1 if self.dropped else 0) + self.dropped

    def problem(self, text: str) -> None:
        """Add a problem."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(text)
        else:
            self.dropped += 1
            self.problems[MAX_PROBLEMS:] = [f"and {self.dropped} more"]


class _Verifier:
    """One verification of one bundle."""

    def __init__(self, bundle: Bundle, progress: Callable[[str, int, int], None]) -> None:
        self.bundle, self.manifest, self.progress = bundle, bundle.manifest, progress
        self.report = Report()
        self.total = sum(size for _, size in self.manifest.files)
        self.index = memoryview(b"")
        self.places = PartPlaces(self.manifest.layers)

    def small_files(self) -> list[str]:
        """Sizes, digest table and kept headers; the names of the files that are whole enough to be read on."""
        sound = []
        for name, size in self.manifest.files:
            problem = size_problem(self.bundle.path(name), size)
            if problem:
                self.report.problem(str(problem))
            else:
                sound.append(name)
        if self.manifest.index.name in sound:
            self._guard(self._read_index)
        for source in self.manifest.sources:
            if source.header_file in sound:
                path = self.bundle.path(source.header_file)
                self._guard(lambda p=path, s=source: check_kept(p, s))  # type: ignore[misc]
                self.report.bytes_checked += source.header_file_bytes
        return sound

    def _guard(self, check: Callable[[], None]) -> None:
        try:
            check()
        except BelError as error:
            self.report.problem(str(error))

    def _read_index(self) -> None:
        index = read_index(self.bundle)
        self.report.bytes_checked += self.manifest.index.size_bytes
        rows: dict[int, bytearray] = {}
        for number, (_, _, part) in enumerate(parts_in_order(self.manifest.layers)):
            rows.setdefault(part.tensor, bytearray()).extend(index[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES])
        for tensor, digests in rows.items():
            if data_digest(digests).hex() != self.manifest.tensors[tensor].digest:
                raise DamagedBundleError(
                    "digest table and manifest disagree",
                    path=str(self.bundle.path(self.manifest.index.name)),
                    tensor=self.manifest.tensors[tensor].name,
                )
        self.index = index

    def content(self) -> None:
        """The content digest follows from the tensors' digests."""
        tensors = self.manifest.tensors
        if (
            content_digest(leaf_digest(t.name, t.type_id, t.ne, bytes.fromhex(t.digest)) for t in tensors)
            != self.manifest.content_digest
        ):
            self.report.problem(
                f"{self.bundle.path('manifest.json')}: the content digest does not follow from the tensors' digests"
            )

    def gguf(self, row: FileRow, dest: str) -> None:
        """A dense or PLE file, whole."""
        tensors = self.manifest.tensors
        placed = [Placed(i, t.ne, t.dest_offset_bytes, t.size_bytes) for i, t in enumerate(tensors) if t.dest == dest]
        digests, path = SliceDigests(), self.bundle.path(row.name)
        header = SliceHasher(row.digest_bytes)
        for piece, data in self._walk(path, row.size_bytes, gguf_spans(row.digest_bytes, placed, row.size_bytes)):
            if piece.span.kind is Kind.SLICE:
                digests.add(piece, data)
                index = piece.span.tensor
                row_of = tensors[index]
                done = piece.completes and digests.complete(index, row_of.ne, row_of.size_bytes)
                if done and digests.tensor(index).hex() != row_of.digest:
                    self._mismatch(path, row_of.dest_offset_bytes, f"tensor {printable(row_of.name)}")
            elif piece.span.kind is Kind.HEADER:
                if data is None:
                    header.update_zeros(piece.size_bytes)
                else:
                    header.update(data)
                if piece.completes and header.digest().hex() != row.digest:
                    self._mismatch(path, 0, "the GGUF header")
            else:
                self._zero_padding(path, piece, data)

    def experts(self, shard: int) -> None:
        """One experts file, whole: every part of every blob, and every byte of padding."""
        row = self.manifest.experts[shard]
        layers = [layer for layer in self.manifest.layers if layer.shard == shard]
        path, digests, page = self.bundle.path(row.name), SliceDigests(), bytearray()
        for piece, data in self._walk(path, row.size_bytes, experts_spans(layers, row.size_bytes)):
            if piece.span.kind is Kind.SLICE:
                found = digests.add(piece, data)
                if found is not None:
                    self._check_part(path, piece.span, found)
            elif piece.span.kind is Kind.HEADER:
                page += bytes(piece.size_bytes) if data is None else data
                if piece.completes and page != expected_experts_header(self.manifest, shard):
                    self._mismatch(path, 0, "the header page (is this file from another bundle?)")
            else:
                self._zero_padding(path, piece, data)

    def sample(self, shard: int) -> None:
        """The header page and a seeded sample of the blobs of one experts file."""
        row = self.manifest.experts[shard]
        layers = [layer for layer in self.manifest.layers if layer.shard == shard]
        blobs = [(layer, expert) for layer in layers for expert in (0, layer.n_expert - 1)]
        chance = random.Random(_SAMPLE_SEED + shard)
        picked = {(b[0].layer, b[1]): b for b in (blobs[0], blobs[-1])}
        while len(picked) < min(QUICK_BLOBS, sum(layer.n_expert for layer in layers)):
            layer = chance.choice(layers)
            expert = chance.randrange(layer.n_expert)
            picked[layer.layer, expert] = (layer, expert)
        path = self.bundle.path(row.name)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with named_errors(path):
                if read_all(fd, PAGE_BYTES, 0) != expected_experts_header(self.manifest, shard):
                    self._mismatch(path, 0, "the header page (is this file from another bundle?)")
                for layer, expert in picked.values():
                    self._sample_blob(path, fd, layer, expert)
        finally:
            os.close(fd)

    def _sample_blob(self, path: Path, fd: int, layer: LayerLayout, expert: int) -> None:
        for part in layer.parts:
            start = layer.part_offset(expert, part)
            hasher = SliceHasher(part.size_bytes)
            for extent in extents(fd, start, start + part.size_bytes):
                if extent.is_hole:
                    hasher.update_zeros(extent.size_bytes)
                    continue
                for at in range(0, extent.size_bytes, CHUNK_BYTES):
                    step = min(CHUNK_BYTES, extent.size_bytes - at)
                    hasher.update(memoryview(read_all(fd, step, extent.start_bytes + at)))
            self._check_part(path, Span(Kind.SLICE, start, part.size_bytes, part.tensor, expert), hasher.digest())
            self.report.bytes_checked += part.size_bytes

    def _check_part(self, path: Path, span: Span, found: bytes) -> None:
        layer, part = self.places.of(span.tensor)
        if part is layer.parts[-1]:
            self.report.blobs_checked += 1
        if self.index and found != self.places.digest(self.index, span.tensor, span.part):
            self._mismatch(path, span.start_bytes, f"layer {layer.layer} expert {span.part} part {part.role}")

    def _walk(self, path: Path, size: int, spans: Iterator[Span]) -> Iterator[tuple[Piece, memoryview | None]]:
        with FileWalk(path, size, spans, self._advance) as walk:
            yield from walk

    def _advance(self, size_bytes: int) -> None:
        self.report.bytes_checked += size_bytes
        self.progress("verify", min(self.report.bytes_checked, self.total), self.total)

    def _zero_padding(self, path: Path, piece: Piece, data: memoryview | None) -> None:
        if data is not None and not is_zero(data):
            at = piece.span.start_bytes + piece.at_bytes
            self._mismatch(path, at, f"padding{self._blob_at(path, at)} that must be zero")

    def _blob_at(self, path: Path, offset: int) -> str:
        """In which blob an offset of an experts file lies, in words; empty for other files."""
        for layer in self.manifest.layers:
            if path.name == self.manifest.experts[layer.shard].name and 0 <= offset - layer.offset_bytes < layer.size_bytes:
                expert, inside = divmod(offset - layer.offset_bytes, layer.stride_bytes)
                before = [p.role for p in layer.parts if p.offset_bytes <= inside]
                return f" of layer {layer.layer} expert {expert} behind part {before[-1]}"
        return ""

    def _mismatch(self, path: Path, offset: int, what: str) -> None:
        self.report.problem(f"{printable(str(path))}: checksum mismatch in {what} (at byte {offset})")


def verify_bundle(bundle: Bundle, *, quick: bool, progress: Callable[[str, int, int], None]) -> Report:
    """Compare a bundle's bytes with its digests: all of them, or (`quick`) sizes, headers, digest table and sampled blobs."""
    run = _Verifier(bundle, progress)
    sound = run.small_files()
    run.content()
    manifest = bundle.manifest
    for shard, row in enumerate(manifest.experts):
        if row.name in sound:
            if quick:
                run.sample(shard)
            else:
                run.experts(shard)
    for file, dest in ((manifest.dense, DENSE), (manifest.ple, PLE)):
        if file is not None and file.name in sound:
            if quick:
                head = read_head(bundle.path(file.name), file.digest_bytes)
                if bytes_digest(head) != file.digest:
                    run.report.problem(
                        f"{printable(str(bundle.path(file.name)))}: checksum mismatch in the GGUF header (at byte 0)"
                    )
                run.report.bytes_checked += len(head)
            else:
                run.gguf(file, dest)
    return run.report
