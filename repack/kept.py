"""`source/*.hdr.zst`: the bytes of a source file that are not tensor data, kept verbatim so that it can be restored.

The decompressed content is the ranges of the manifest's `kept`, one after the other: the header, then every gap that is
not all zero, the bytes behind the last tensor among them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import zstandard
from blake3 import blake3

from bel.formats.atomic import named_errors
from bel.formats.errors import DamagedBundleError
from bel.formats.manifest import SourceRow
from bel.formats.units import MIB

_LEVEL = 3  # vocabularies shrink to a third at any level; higher ones cost seconds for a few percent


class KeptWriter:
    """Writes one `.hdr.zst` file; `ranges` are the [offset, bytes] of what was added."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ranges: list[tuple[int, int]] = []
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._pack = zstandard.ZstdCompressor(level=_LEVEL).compressobj()
        self._digest = blake3()
        self._size = 0

    def add(self, offset_bytes: int, data: bytes | bytearray) -> None:
        """Keep `data`, which stands at an offset of the source that is above all before."""
        self.ranges.append((offset_bytes, len(data)))  # never merged: a tensor of no bytes may stand between two
        self._write(self._pack.compress(data))

    def finish(self) -> tuple[int, str]:
        """Flush to the disk; the file's size in bytes and its digest."""
        self._write(self._pack.flush())
        with named_errors(self.path):
            os.fsync(self._fd)
        return self._size, self._digest.hexdigest()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _write(self, data: bytes) -> None:
        self._digest.update(data)
        self._size += len(data)
        with named_errors(self.path):
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]


def check_kept(path: Path, row: SourceRow) -> None:
    """Raise DamagedBundleError where a `.hdr.zst` file is not what was written."""
    hasher, size = blake3(), 0
    with path.open("rb") as file:
        while data := file.read(MIB):
            hasher.update(data)
            size += len(data)
    if size != row.header_file_bytes or hasher.hexdigest() != row.header_file_digest:
        raise DamagedBundleError("the checksum of the kept source header does not match the manifest", path=str(path))


def read_kept(path: Path, row: SourceRow) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of what was kept, in order, in steps of at most 1 MiB.

    Never more than the manifest's ranges are decompressed.  Raises DamagedBundleError where the file does not hold them.
    """
    damaged = DamagedBundleError("the kept source header does not decompress to what the manifest says", path=str(path))
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as reader:
        try:
            for start, size in row.kept:
                at = start
                while at < start + size:
                    data = reader.read(min(start + size - at, MIB))
                    if not data:
                        raise damaged
                    yield at, data
                    at += len(data)
            if reader.read(1):
                raise damaged
        except zstandard.ZstdError:
            raise damaged from None


class KeptBytes:
    """The bytes of a source file that are not tensor data, asked for in ascending order: what was kept, else zeros."""

    def __init__(self, path: Path, row: SourceRow) -> None:
        self._ranges = row.kept
        self._blocks = read_kept(path, row)
        self._offset, self._block = next(self._blocks, (row.size_bytes, b""))
        self._end = row.size_bytes

    def any(self, offset_bytes: int, size_bytes: int) -> bool:
        """Whether any of these bytes was kept; if not, all of them are zero."""
        return any(offset < offset_bytes + size_bytes and offset + size > offset_bytes for offset, size in self._ranges)

    def take(self, offset_bytes: int, size_bytes: int) -> bytes:
        """The `size_bytes` bytes at an offset, which must not be below the end of an earlier call."""
        out = bytearray(size_bytes)
        end = offset_bytes + size_bytes
        while self._offset < end:
            skip = max(0, offset_bytes - self._offset)
            part = self._block[skip : end - self._offset]
            at = self._offset + skip - offset_bytes
            out[at : at + len(part)] = part
            if self._offset + len(self._block) > end:
                break
            self._offset, self._block = next(self._blocks, (self._end, b""))
            if not self._block:
                break
        return bytes(out)
