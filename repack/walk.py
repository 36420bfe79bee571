"""Walking over a file's spans while a second thread reads ahead."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType

from bel.formats.errors import BadInputError, BelError
from bel.repack.spans import Piece, Span, SpanWalk
from bel.repack.stream import Stream, file_reads

Advance = Callable[[int], None]
"""Called with the number of bytes that have been walked since the last call."""


def counter(progress: Callable[[str, int, int], None], phase: str, total_bytes: int) -> Advance:
    """An Advance that tells `progress(phase, bytes done, bytes in all)`."""
    done = 0

    def advance(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        progress(phase, done, total_bytes)

    return advance


def pieces(stream: Stream, spans: Iterable[Span], advance: Advance) -> Iterator[tuple[Piece, memoryview | None]]:
    """Every piece of every span with its bytes (None: it lies in a hole), in order.

    The bytes are valid until the next piece is asked for.
    """
    walk = SpanWalk(spans)
    for chunk in stream:
        for piece in walk.feed(chunk.size_bytes):
            view = chunk.view
            yield piece, None if view is None else view[piece.chunk_bytes : piece.chunk_bytes + piece.size_bytes]
        advance(chunk.size_bytes)


def source_shrank(path: Path) -> BelError:
    """The error for a source file that ends earlier than its header was scanned to."""
    return BadInputError("the file became shorter while it was read", path=str(path))


class FileWalk:
    """One file, opened, read once and closed: iterate inside `with`.  After the end `sha256` and `bytes_read` are known."""

    def __init__(
        self,
        path: Path,
        size_bytes: int,
        spans: Iterable[Span],
        advance: Advance,
        *,
        sha256: bool = False,
        short_read: Callable[[Path], BelError] | None = None,
    ) -> None:
        self.path, self.size_bytes = path, size_bytes
        self._spans, self._advance = spans, advance
        self._want_sha256, self._short_read = sha256, short_read

    def __enter__(self) -> FileWalk:
        self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            reads = file_reads(self.path, self.fd, self.size_bytes)
            self._stream = (
                Stream(reads, sha256=self._want_sha256, short_read=self._short_read)
                if self._short_read
                else Stream(reads, sha256=self._want_sha256)
            )
            self._stream.__enter__()
        except BaseException:
            os.close(self.fd)
            raise
        return self

    def __iter__(self) -> Iterator[tuple[Piece, memoryview | None]]:
        return pieces(self._stream, self._spans, self._advance)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._stream.__exit__(kind, error, trace)
        finally:
            os.close(self.fd)

    @property
    def sha256(self) -> str | None:
        """SHA-256 of the file, where it was asked for."""
        return self._stream.sha256()

    @property
    def bytes_read(self) -> int:
        """Bytes that came from the disk or its cache; holes are not read."""
        return self._stream.bytes_read
