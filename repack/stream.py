"""Reading ahead: a thread fills buffers, a second one may hash them with SHA-256, the caller consumes them.

The three run side by side because each spends its time outside Python's lock (the kernel, OpenSSL, BLAKE3).
"""

from __future__ import annotations

import hashlib
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from bel.formats.atomic import named_errors
from bel.formats.digest import zero_runs
from bel.formats.errors import BelError, DamagedBundleError
from bel.formats.holes import extents, hole_bytes, settle
from bel.formats.signals import signals_held
from bel.formats.units import MIB

CHUNK_BYTES = MIB  # large enough that a thread switch is noise, small enough that a few stay in the processor's cache
CHUNKS = 8
DROP_BYTES = 32 * MIB
"""What was read is dropped from the page cache in steps of this size.  Left there it pushes out what other programs use, and
finding fresh pages then costs more time than the reading: half of a conversion's processor time on a virtual machine."""
MAX_HASHED_HOLE_BYTES = 2**31
"""SHA-256 cannot skip a run of zeros: a file with more holes than this would cost seconds to hours of hashing nothing."""


@dataclass(frozen=True, slots=True)
class Read:
    """One read to be done: from `fd` at `offset_bytes`, or, where `fd` is None, `size_bytes` of a hole.

    `data` instead of both: bytes that are at hand already.
    """

    path: Path
    fd: int | None
    offset_bytes: int
    size_bytes: int
    data: bytes | None = None


class Chunk:
    """Consecutive bytes of a stream: `view`, or, where that is None, `size_bytes` of hole."""

    __slots__ = ("_buffer", "_users", "size_bytes", "view")

    def __init__(self, size_bytes: int, buffer: mmap.mmap | None, users: int) -> None:
        self.size_bytes = size_bytes
        self._buffer = buffer
        self._users = users
        self.view = memoryview(buffer)[:size_bytes] if buffer is not None else None


class Stream:
    """The bytes of a sequence of reads as chunks, in order.  Iterate inside `with`.

    `sha256` after the end: the hex digest of everything, where asked for.  `bytes_read`: what came from disk.
    `short_read` is called with the path of a file that ended too early and gives the error to raise.
    """

    def __init__(
        self,
        reads: Iterable[Read],
        *,
        sha256: bool = False,
        short_read: Callable[[Path], BelError] = lambda path: DamagedBundleError("truncated while it was read", path=str(path)),
    ) -> None:
        self._reads = reads
        self._short_read = short_read
        self._hash = hashlib.sha256() if sha256 else None
        self._free: queue.SimpleQueue[mmap.mmap | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Chunk | BaseException | None] = queue.SimpleQueue()
        self._to_hash: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stop = False
        self._threads: list[threading.Thread] = []
        self._hash_error: BaseException | None = None
        self.bytes_read = 0

    def __enter__(self) -> Stream:
        try:
            with signals_held():
                for _ in range(CHUNKS):
                    self._free.put(mmap.mmap(-1, CHUNK_BYTES))
                self._start(self._read_loop)
                if self._hash is not None:
                    self._start(self._hash_loop)
        except BaseException:  # a thread left behind would read from files that are closed, or from others in their place
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        with signals_held():
            self._stop = True
            self._free.put(None)
            self._to_hash.put(None)
            for thread in self._threads:
                thread.join()

    def __iter__(self) -> Iterator[Chunk]:
        while True:
            item = self._ready.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                break
            yield item
            self._release(item)
        if self._hash is not None:
            self._threads[1].join()
            if self._hash_error is not None:
                raise self._hash_error

    def sha256(self) -> str | None:
        """The SHA-256 of the stream, once it has been iterated to its end; None where it was not asked for."""
        return self._hash.hexdigest() if self._hash is not None else None

    def _start(self, loop: Callable[[], None]) -> None:
        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _release(self, chunk: Chunk) -> None:
        with self._lock:
            chunk._users -= 1
            done = chunk._users == 0
        if done and chunk._buffer is not None:
            chunk.view = None
            self._free.put(chunk._buffer)

    def _send(self, size: int, buffer: mmap.mmap | None) -> None:
        chunk = Chunk(size, buffer, 1 if self._hash is None else 2)
        if self._hash is not None:
            self._to_hash.put(chunk)
        self._ready.put(chunk)

    def _read_loop(self) -> None:
        try:
            self._read_everything()
            if self._hash is not None:
                self._to_hash.put(None)
            self._ready.put(None)
        except BaseException as error:  # raised again in the caller's thread
            self._ready.put(error)

    def _read_everything(self) -> None:
        """Fill buffers from read after read; a buffer is sent when it is full, before a hole, and at the end."""
        buffer: mmap.mmap | None = None
        filled = 0
        for read in self._reads:
            if read.fd is None and read.data is None:
                if buffer is not None and filled:
                    self._send(filled, buffer)
                    buffer, filled = None, 0
                self._send(read.size_bytes, None)
                continue
            done = dropped = 0
            while done < read.size_bytes:
                if buffer is None:
                    buffer = self._free.get()
                if buffer is None or self._stop:
                    return
                step = min(read.size_bytes - done, CHUNK_BYTES - filled)
                self._fill(memoryview(buffer)[filled : filled + step], read, done)
                done, filled = done + step, filled + step
                if read.fd is not None and (done - dropped >= DROP_BYTES or done == read.size_bytes):
                    os.posix_fadvise(read.fd, read.offset_bytes + dropped, done - dropped, os.POSIX_FADV_DONTNEED)
                    dropped = done
                if filled == CHUNK_BYTES:
                    self._send(filled, buffer)
                    buffer, filled = None, 0
        if buffer is not None and filled:
            self._send(filled, buffer)

    def _fill(self, view: memoryview, read: Read, done: int) -> None:
        if read.data is not None:
            view[:] = read.data[done : done + len(view)]
            return
        assert read.fd is not None, "a read has a descriptor, data, or neither"
        at = read.offset_bytes + done
        with named_errors(read.path):
            while view:
                got = os.preadv(read.fd, [view], at)
                if got == 0:
                    raise self._short_read(read.path)
                self.bytes_read += got
                view, at = view[got:], at + got

    def _hash_loop(self) -> None:
        while (chunk := self._to_hash.get()) is not None and not self._stop:
            try:
                if self._hash_error is None:
                    self._hash_chunk(chunk)
            except BaseException as error:  # raised again in the caller's thread
                self._hash_error = error
            self._release(chunk)  # after an error too: the reader waits for this buffer

    def _hash_chunk(self, chunk: Chunk) -> None:
        assert self._hash is not None, "the thread is started only where a hash is wanted"
        for data in zero_runs(chunk.size_bytes) if chunk.view is None else (chunk.view,):
            self._hash.update(data)


def sparse_bytes(path: Path, size_bytes: int, ranges: list[tuple[int, int]] | None = None) -> int:
    """How many bytes of a file are holes, asked once the file is settled; of `ranges` (sorted [start, end)) where given."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with named_errors(path):
            if not hole_bytes(fd, size_bytes):
                return 0
            settle(fd)
            if ranges is None:
                return hole_bytes(fd, size_bytes)
            return sum(e.size_bytes for start, end in ranges for e in extents(fd, start, end) if e.is_hole)
    finally:
        os.close(fd)


def file_reads(path: Path, fd: int, size_bytes: int) -> Iterator[Read]:
    """The reads that cover an open file once, from its start, with its holes left out."""
    with named_errors(path):
        if hole_bytes(fd, size_bytes):
            settle(fd)
        for extent in extents(fd, 0, size_bytes):
            yield Read(path, None if extent.is_hole else fd, extent.start_bytes, extent.size_bytes)
