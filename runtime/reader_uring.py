"""Reads through an io_uring: no threads of ours, and what a read costs Python is one entry in a ring."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import time
from collections import deque
from collections.abc import Sequence

from bel.formats.errors import DamagedBundleError, MachineError
from bel.formats.signals import signals_held
from bel.runtime.reader_files import NO_DIRECT, ReaderFiles, RefusedError, no_direct
from bel.runtime.reads import PAGE_BYTES, Batches, Piece, Read, read_error, short_read
from bel.runtime.uring import Ring

RING_READS = 256
"""Reads in flight at most.  The block layer has as many requests for a disk, and a read in flight costs no thread."""

_AGAIN = frozenset({errno.EINTR, errno.EAGAIN, errno.EBUSY})
_TRIES = 1000  # of what the kernel puts off, a millisecond apart: then it counts as refused, for a wait must end
_HINT = "Try the other way to read: --reader threads"
_REFUSALS = {
    errno.ENOSYS: "this kernel has no io_uring",
    errno.EPERM: "io_uring is forbidden here, as in many containers",
    errno.EACCES: "io_uring is forbidden here",
    errno.EINVAL: "this kernel's io_uring is too old (6.1 is needed)",
    # Of a read: where the kernel could start none of its threads for it, which count as this user's.
    errno.ECANCELED: "an io_uring gets no thread of the kernel (the limit of processes, `ulimit -u` or a container's)",
    errno.ENOMEM: "the memory for an io_uring is refused (this kernel may charge it to `ulimit -l`)",
}


class UringReader:
    """A `Reader` of direct files.  Raises RefusedError where the kernel has no io_uring for us, or none for these files."""

    def __init__(self, files: ReaderFiles, *, piece_bytes: int, why: str) -> None:
        self.name, self.why = "io_uring", why
        self._files = files
        self._batches = Batches(len(files.fds), piece_bytes, files.step_bytes)
        self._line: deque[Piece] = deque()
        self._flying: dict[int, Piece] = {}
        self._last_key = 0
        self._is_closed = False
        self._ring = _open_ring()
        try:
            for file in range(len(files.fds)):
                self._probe(file)
        except BaseException:
            self._close_ring()
            raise

    def submit(self, reads: Sequence[Read], tag: int) -> None:
        """See `Reader`."""
        self._line.extend(self._batches.add(reads, tag))
        self._push()
        self._enter(0)

    def wait(self, tag: int) -> None:
        """See `Reader`."""
        batch = self._batches.of(tag)
        tries = 0
        while batch.left:
            self._push()
            # with none left in line all of the batch's are in the ring: one sleep for them, not one for each
            is_put_off = not self._enter(1 if self._line else batch.left)
            tries = 0 if self._collect() or not is_put_off else tries + 1
            if tries > _TRIES:
                raise MachineError("the kernel goes on putting off the reads of an io_uring", hint=_HINT)
        self._batches.close(tag)

    def close(self) -> None:
        """See `Reader`.  Raises MachineError where the ring fails: then the memory may still be written to."""
        if self._is_closed:
            return
        with signals_held():
            self._is_closed = True
            self._line.clear()
            try:
                self._close_ring()
            finally:
                self._files.close()

    def _push(self) -> None:
        """Queue what stands in line, as far as there is room."""
        room = min(RING_READS - self._ring.in_flight, self._ring.entries) - self._ring.queued
        for _ in range(min(room, len(self._line))):
            piece = self._line.popleft()
            self._last_key += 1
            self._flying[self._last_key] = piece
            fd = self._files.fds[piece.file]
            self._ring.queue_read(fd, piece.offset_bytes, piece.size_bytes, piece.address, self._last_key)

    def _enter(self, wait_for: int) -> bool:
        """Hand over what is queued and wait for completions; False where the kernel put it off."""
        try:
            self._ring.enter(wait_for)
        except OSError as error:
            if error.errno == errno.EEXIST:
                raise RuntimeError("a reader works only in the thread that opened it") from error
            if error.errno not in _AGAIN:
                raise MachineError(f"the io_uring failed: {error.strerror}", hint=_HINT) from error
            if error.errno != errno.EINTR and wait_for:
                time.sleep(0.001)
            return error.errno == errno.EINTR
        return True

    def _collect(self) -> int:
        """Book what ended; how many that were."""
        ended = self._ring.collect()
        for key, result in ended:
            self._book(self._flying.pop(key), result)
        return len(ended)

    def _book(self, piece: Piece, result: int) -> None:
        path = self._files.paths[piece.file]
        if -result in _AGAIN and piece.tries < _TRIES:
            piece.tries += 1
            self._line.append(piece)
        elif result < 0:
            piece.batch.end(read_error(path, piece, OSError(-result, os.strerror(-result))))
        elif not piece.advance(result, self._files.step_bytes):
            piece.batch.end(short_read(path, piece, result))
        elif piece.size_bytes:
            self._line.append(piece)
        else:
            piece.batch.end(None)

    def _probe(self, file: int) -> None:
        """One real read.  Raises RefusedError, or MachineError where the file itself cannot be read."""
        page = mmap.mmap(-1, PAGE_BYTES)
        read = Read(file, 0, PAGE_BYTES, ctypes.addressof(ctypes.c_char.from_buffer(page)))
        with contextlib.suppress(DamagedBundleError):  # a file below a page: it was read
            try:
                self.submit([read], 0)
                self.wait(0)
            except MachineError as error:
                code = error.__cause__.errno if isinstance(error.__cause__, OSError) else None
                if code in NO_DIRECT:
                    raise no_direct(self._files.paths[file]) from error
                if code in _REFUSALS:
                    raise RefusedError(_REFUSALS[code]) from error
                raise

    def _close_ring(self) -> None:
        """Wait for all that the kernel took; the ring itself knows what that is, whatever was interrupted on our side."""
        try:
            self._drain()
        finally:
            self._ring.close()

    def _drain(self) -> None:
        self._ring.collect()
        while self._ring.in_flight:
            try:
                self._ring.enter(1, hand_over=False)
            except OSError as error:
                if error.errno != errno.EINTR:
                    raise MachineError(f"the io_uring failed with reads in flight: {error.strerror}", hint=_HINT) from error
            self._ring.collect()


def _open_ring() -> Ring:
    try:
        return Ring(RING_READS)
    except OSError as error:
        if error.errno in _REFUSALS:
            raise RefusedError(_REFUSALS[error.errno]) from error
        raise MachineError(f"an io_uring cannot be made: {error.strerror}") from error
