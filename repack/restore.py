"""Restoring the original files from a bundle, byte for byte."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bel.formats.atomic import fsync_folder, named_errors, read_head
from bel.formats.bundle import Bundle, check_sizes, expected_experts_header, read_index
from bel.formats.errors import DamagedBundleError, UsageError
from bel.formats.experts_file import PartPlaces
from bel.formats.holes import extents, hole_bytes
from bel.formats.manifest import DENSE, EXPERTS, PLE, SourceRow
from bel.formats.signals import signals_held
from bel.formats.staging import StagingFolder, publish_files
from bel.formats.units import MIB
from bel.repack.digests import SliceDigests
from bel.repack.kept import KeptBytes, check_kept
from bel.repack.sink import MAX_OPEN, Sink
from bel.repack.spans import Kind, Placed, Span, gguf_spans
from bel.repack.stream import Read, Stream
from bel.repack.target import check_leftover, check_space
from bel.repack.walk import Advance, counter, pieces

SPANS_AHEAD = 4  # slices of about a megabyte: enough to keep a disk busy, few enough to stay in the page cache
STAGING_NAME = ".bel-restore.bel-tmp"


@dataclass(frozen=True, slots=True)
class RestoredFile:
    """One restored file.  `sha256` is None only where the source was too sparse to have one (see SourceRow)."""

    name: str
    size_bytes: int
    sha256: str | None


def restore(bundle: Bundle, folder: Path, *, force: bool, progress: Callable[[str, int, int], None]) -> list[RestoredFile]:
    """Write the source files of a bundle into `folder`, made if need be; all of them, or after any error none.

    Raises UsageError where one exists and `force` is not set, DamagedBundleError where the bundle's bytes are not those
    that were written (each is checked before a file gets its name), OSError and MachineError for the machine's refusals.
    """
    manifest = bundle.manifest
    names = [source.name for source in manifest.sources]
    _check_free(bundle, folder, names, force=force)
    check_sizes(bundle)
    with _folder(folder):
        check_space(folder, sum(s.size_bytes - s.hole_bytes for s in manifest.sources))
        with StagingFolder(folder / STAGING_NAME) as staging, _Parts(bundle) as parts:
            sink = Sink(staging.path)
            try:
                advance = counter(progress, "restore", sum(s.size_bytes for s in manifest.sources))
                done = [_restore_file(parts, number, sink, advance) for number in range(len(names))]
                sink.sync()
            finally:
                sink.close()
            _check_free(bundle, folder, names, force=force)
            publish_files(staging, folder, names, is_last=True)
    return done


@contextlib.contextmanager
def _folder(folder: Path) -> Iterator[None]:
    """Make the folder if need be; after an error one that was made here is gone again."""
    if folder.is_dir():
        yield
        return
    if not folder.parent.is_dir():
        raise UsageError("the folder that should hold the output does not exist", path=str(folder.parent))
    made = False
    try:
        with signals_held():
            os.mkdir(folder)
            made = True
            fsync_folder(folder.parent)
        yield
    except BaseException:
        with signals_held(then_raise=False):
            if made and not os.listdir(folder):
                os.rmdir(folder)
        raise


def _check_free(bundle: Bundle, folder: Path, names: list[str], *, force: bool) -> None:
    if os.path.lexists(folder) and not folder.is_dir():
        raise UsageError("the output exists and is not a folder", path=str(folder))
    own, place = os.path.realpath(bundle.folder), os.path.realpath(folder)
    if place == own or place.startswith(own + os.sep):
        raise UsageError("files are not restored into the bundle itself", path=str(folder), hint="Give another -o")
    staging = folder / STAGING_NAME
    if staging.is_dir() and not staging.is_symlink():
        check_leftover(staging, sorted(e.name for e in os.scandir(staging) if e.is_dir(follow_symlinks=False)))
    for name in names:
        path = folder / name
        if os.path.lexists(path) and not force:
            raise UsageError(
                "the file exists already", path=str(path), hint="Use --force to replace it, or -o for another folder"
            )
        if path.is_dir() and not path.is_symlink():
            raise UsageError("a folder of this name exists; it is not replaced", path=str(path))


class _Parts:
    """The open files of a bundle, as the reads that give back a source file."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.index = read_index(bundle)
        self.places = PartPlaces(bundle.manifest.layers)
        self._fds: OrderedDict[str, tuple[int, bool]] = OrderedDict()

    def __enter__(self) -> _Parts:
        manifest = self.bundle.manifest
        for shard, row in enumerate(manifest.experts):
            path = self.bundle.path(row.name)
            if read_head(path, len(expected_experts_header(manifest, shard))) != expected_experts_header(manifest, shard):
                raise DamagedBundleError(
                    "checksum mismatch in the header page: damaged, or from another bundle", path=str(path), offset_bytes=0
                )
        return self

    def __exit__(self, *_: object) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1][0])

    def reads(self, spans: Iterator[Span], kept: KeptBytes) -> Iterator[Read]:
        """What to read for each span of a source file, in order."""
        spans, later = itertools.tee(spans)
        for span, soon in itertools.zip_longest(spans, itertools.islice(later, SPANS_AHEAD, None)):
            if soon is not None and soon.kind is Kind.SLICE:
                self._announce(soon)
            if span.kind is Kind.SLICE:
                yield from self._slice(span)
            elif not kept.any(span.start_bytes, span.size_bytes):
                yield Read(self.bundle.folder, None, span.start_bytes, span.size_bytes)  # zeros stay unwritten
            else:
                for at in range(span.start_bytes, span.start_bytes + span.size_bytes, MIB):
                    size = min(MIB, span.start_bytes + span.size_bytes - at)
                    yield Read(self.bundle.folder, None, at, size, kept.take(at, size))

    def _announce(self, span: Span) -> None:
        """Have the kernel fetch a slice that is due soon, where its file is open: it lies elsewhere than the one before."""
        name, offset = self._place(span)
        if name in self._fds and not self._fds[name][1]:
            os.posix_fadvise(self._fds[name][0], offset, span.size_bytes, os.POSIX_FADV_WILLNEED)

    def _slice(self, span: Span) -> Iterator[Read]:
        name, offset = self._place(span)
        path = self.bundle.path(name)
        fd, sparse = self._open(path)
        if not sparse:
            yield Read(path, fd, offset, span.size_bytes)
            return
        for extent in extents(fd, offset, offset + span.size_bytes):
            yield Read(path, None if extent.is_hole else fd, extent.start_bytes, extent.size_bytes)

    def _place(self, span: Span) -> tuple[str, int]:
        """The file of the bundle that holds a slice, and the offset in it."""
        manifest = self.bundle.manifest
        row = manifest.tensors[span.tensor]
        if row.dest == EXPERTS:
            layer, part = self.places.of(span.tensor)
            return manifest.experts[layer.shard].name, layer.part_offset(span.part, part)
        file = manifest.dense if row.dest == DENSE else manifest.ple
        assert file is not None, "the manifest was checked: a PLE tensor has a PLE file"
        return file.name, row.dest_offset_bytes + span.part * span.size_bytes

    def _open(self, path: Path) -> tuple[int, bool]:
        """A descriptor of a file of the bundle, and whether it has holes worth looking for."""
        if path.name in self._fds:
            self._fds.move_to_end(path.name)
            return self._fds[path.name]
        while len(self._fds) >= MAX_OPEN:  # the oldest is read to its end: each read is done before the next is asked for
            os.close(self._fds.popitem(last=False)[1][0])
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._fds[path.name] = (fd, False)
        with named_errors(path):
            self._fds[path.name] = (fd, hole_bytes(fd, os.fstat(fd).st_size) > 0)
            if path.name != self.bundle.manifest.dense.name:
                # The kernel's own readahead would fetch the parts of a blob that are not due before the next tensor.
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return self._fds[path.name]

    def check(self, span: Span, digest: bytes) -> None:
        """Raise DamagedBundleError where a slice of an expert stack does not hash to what it must."""
        row = self.bundle.manifest.tensors[span.tensor]
        if row.dest != EXPERTS:
            return
        layer, part = self.places.of(span.tensor)
        if digest != self.places.digest(self.index, span.tensor, span.part):
            raise DamagedBundleError(
                f"checksum mismatch in layer {layer.layer} expert {span.part} part {part.role}: the bytes are corrupt",
                path=str(self.bundle.path(self.bundle.manifest.experts[layer.shard].name)),
                offset_bytes=layer.part_offset(span.part, part),
            )


def _restore_file(parts: _Parts, number: int, sink: Sink, advance: Advance) -> RestoredFile:
    manifest, bundle = parts.bundle.manifest, parts.bundle
    source = manifest.sources[number]
    kept_path = bundle.path(source.header_file)
    check_kept(kept_path, source)
    placed = [
        Placed(i, t.ne, t.source_offset_bytes, t.size_bytes) for i, t in enumerate(manifest.tensors) if t.source == number
    ]
    header_bytes = source.kept[0][1] if source.kept else 0
    spans = functools.partial(gguf_spans, header_bytes, placed, source.size_bytes)  # never listed: a hole may be long
    kept, digests = KeptBytes(kept_path, source), SliceDigests()
    sink.create(source.name, source.size_bytes)
    with Stream(parts.reads(spans(), kept), sha256=source.sha256 is not None) as stream:
        for piece, data in pieces(stream, spans(), advance):
            if piece.span.kind is Kind.SLICE:
                digest = digests.add(piece, data)
                if digest is not None:
                    parts.check(piece.span, digest)
            if data is not None:
                sink.write(source.name, data, piece.span.start_bytes + piece.at_bytes)
    _check_file(bundle, source, number, digests, stream.sha256())
    return RestoredFile(source.name, source.size_bytes, stream.sha256())


def _check_file(bundle: Bundle, source: SourceRow, number: int, digests: SliceDigests, sha256: str | None) -> None:
    for index, row in enumerate(bundle.manifest.tensors):
        if row.source == number and digests.tensor(index) != bytes.fromhex(row.digest):
            ple, dense = bundle.manifest.ple, bundle.manifest.dense
            file = ple if ple and row.dest == PLE else dense if row.dest == DENSE else bundle.manifest.index
            raise DamagedBundleError(
                "checksum mismatch: the tensor's bytes are corrupt", path=str(bundle.path(file.name)), tensor=row.name
            )
    if sha256 != source.sha256:
        raise DamagedBundleError(
            f"the restored {source.name} is not the original: its sha256 does not match",
            path=str(bundle.folder),
            found=sha256,
            expected=source.sha256,
        )
