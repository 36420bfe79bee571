"""Reads by a pool of threads, each in `preadv`: direct, or through the page cache and out of it again."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
from collections.abc import Sequence

from bel.formats.errors import MachineError
from bel.formats.signals import signals_held
from bel.runtime.reader_files import ReaderFiles
from bel.runtime.reads import Batches, Piece, Read, read_error, short_read


class ThreadsReader:
    """A `Reader` whose reads in flight are at most its threads; the rest stands in line, first come first served.

    Of files that are not direct each piece is dropped from the page cache once it is read, so that at most the pieces in
    flight count against a memory limit.
    """

    def __init__(self, files: ReaderFiles, *, n_threads: int, piece_bytes: int, why: str) -> None:
        self.name = "threads" if files.is_direct else "buffered"
        self.why = why
        self._files = files
        self._batches = Batches(len(files.fds), piece_bytes, files.step_bytes)
        self._line: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._guard = threading.Lock()  # of every batch
        # Not a Condition: an interrupt can strike its `wait` where it does not hold the lock that it then gives back.
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        # daemons: a reader that nobody closed must not keep the process from ending
        self._threads = [threading.Thread(target=self._work, name=f"read-{i}", daemon=True) for i in range(n_threads)]
        self._start()

    def _start(self) -> None:
        started = 0
        try:
            with signals_held():
                for thread in self._threads:
                    thread.start()
                    started += 1
        except BaseException as error:
            self._stop(self._threads[:started])
            if not isinstance(error, RuntimeError):
                raise
            raise MachineError(  # the system has none for this process
                f"no more threads can be started: {error}",
                found=f"{started} threads",
                expected=f"{len(self._threads)} threads",
                hint="Raise the limit of processes (ulimit -u, or that of the container)",
            ) from error

    def submit(self, reads: Sequence[Read], tag: int) -> None:
        """See `Reader`."""
        with self._guard:
            pieces = self._batches.add(reads, tag)
        for piece in pieces:
            self._line.put(piece)

    def wait(self, tag: int) -> None:
        """See `Reader`."""
        batch = self._batches.of(tag)
        while batch.left:
            self._ended.get()
        with contextlib.suppress(queue.Empty):
            while True:  # what woke nobody: whoever waits next looks first
                self._ended.get_nowait()
        self._batches.close(tag)

    def close(self) -> None:
        """See `Reader`."""
        with signals_held():
            with contextlib.suppress(queue.Empty):
                while True:  # not `empty` and `get`: a thread may take the last one in between
                    self._line.get_nowait()
            self._stop(self._threads)
            self._files.close()

    def _stop(self, threads: Sequence[threading.Thread]) -> None:
        for _ in threads:
            self._line.put(None)
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        while (piece := self._line.get()) is not None:
            error = self._read(piece)
            with self._guard:
                piece.batch.end(error)
                is_last = not piece.batch.left
            if is_last:
                self._ended.put(None)

    def _read(self, piece: Piece) -> Exception | None:
        """Read a piece to its end; what went wrong, which `wait` raises."""
        path = self._files.paths[piece.file]
        try:
            while piece.size_bytes:
                count = self._read_once(piece)
                if not piece.advance(count, self._files.step_bytes):
                    return short_read(path, piece, count)
        except OSError as error:
            return read_error(path, piece, error)
        except Exception as error:  # a thread that died of it would leave `wait` waiting for ever
            return error
        return None

    def _read_once(self, piece: Piece) -> int:
        fd = self._files.fds[piece.file]
        target = (ctypes.c_char * piece.size_bytes).from_address(piece.address)
        count = os.preadv(fd, [target], piece.offset_bytes)  # EINTR is Python's own business (PEP 475)
        if not self._files.is_direct:
            os.posix_fadvise(fd, piece.offset_bytes, count, os.POSIX_FADV_DONTNEED)
        return count
