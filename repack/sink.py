"""The files of a bundle while they are written: few descriptors, every error named, every file flushed."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

from bel.formats.atomic import named_errors, write_all
from bel.formats.units import MIB

MAX_OPEN = 4
"""A dense file, a PLE file and two experts files: a source of a thousand shards must convert under a small descriptor limit."""
FLUSH_BYTES = 16 * MIB
"""How much may be dirty before its writeback is begun: the disk then works while the rest is read and hashed."""


class Sink:
    """Files of one folder, created sparse at their full size and written at any offset."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes_written = 0
        self._open: OrderedDict[str, int] = OrderedDict()
        self._dirty: dict[str, list[int]] = {}
        self._made: list[str] = []

    def create(self, name: str, size_bytes: int) -> None:
        """Make a file of `size_bytes` zero bytes, none of which takes space yet."""
        path = self.folder / name
        with named_errors(path):
            os.ftruncate(self._open_file(name, os.O_CREAT | os.O_EXCL), size_bytes)
        self._made.append(name)

    def write(self, name: str, data: memoryview | bytes, offset_bytes: int) -> None:
        """Write at an offset."""
        with named_errors(self.folder / name):
            fd = self._fd(name)
            write_all(fd, memoryview(data), offset_bytes)
            self.bytes_written += len(data)
            self._begin_writeback(name, fd, offset_bytes, len(data))

    def _begin_writeback(self, name: str, fd: int, offset: int, size: int) -> None:
        dirty = self._dirty.setdefault(name, [offset, offset, 0])
        dirty[0], dirty[1], dirty[2] = min(dirty[0], offset), max(dirty[1], offset + size), dirty[2] + size
        if dirty[2] >= FLUSH_BYTES:
            # DONTNEED starts the writeback of dirty pages and drops clean ones, which nobody reads again.
            os.posix_fadvise(fd, dirty[0], dirty[1] - dirty[0], os.POSIX_FADV_DONTNEED)
            del self._dirty[name]

    def sync(self) -> None:
        """Flush every file to the disk and drop its pages from the cache, so that a later read is a read of the disk."""
        for name in self._made:
            with named_errors(self.folder / name):
                fd = self._fd(name)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close what is open, without flushing."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _fd(self, name: str) -> int:
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        return self._open_file(name, 0)

    def _open_file(self, name: str, flags: int) -> int:
        while len(self._open) >= MAX_OPEN:
            old_name, old = self._open.popitem(last=False)
            with named_errors(self.folder / old_name):
                try:
                    os.fsync(old)  # an error of a write that is still to come would be lost with the descriptor
                finally:
                    os.close(old)
        fd = os.open(self.folder / name, flags | os.O_RDWR | os.O_CLOEXEC, 0o666)
        self._open[name] = fd
        return fd
