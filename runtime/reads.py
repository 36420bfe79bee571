"""What is read from where to where, and what a reader of any kind promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bel.formats.errors import BelError, DamagedBundleError, MachineError
from bel.formats.units import align_up

PAGE_BYTES = 4096
"""What offset, size and address of a direct read are multiples of: enough for every file system and disk in use."""


@dataclass(frozen=True, slots=True)
class Read:
    """One run of bytes of one file of a reader (by its place in `paths`), and the address of this process to put it at.

    With a direct reader all three numbers of bytes are multiples of 4096.  The memory stays the caller's: it must be there
    until `wait` or `close` has returned.
    """

    file: int
    offset_bytes: int
    size_bytes: int
    address: int


class Reader(Protocol):
    """Reads files straight into memory, many reads at once.  It belongs to the thread that opened it."""

    @property
    def name(self) -> str:
        """'io_uring', 'threads' or 'buffered'."""

    @property
    def why(self) -> str:
        """Why it is this one and no better one, a sentence without its full stop; empty for the best."""

    def submit(self, reads: Sequence[Read], tag: int) -> None:
        """Start reads and return at once.  Those of a tag that is still in flight join it.

        Raises ValueError for a misaligned read, before any is started.
        """

    def wait(self, tag: int) -> None:
        """Return once all reads of the tag are complete; the tag is then free again.

        Raises ValueError for a tag that was not submitted.  If reads failed it raises the first one's error once none of the
        tag's is in flight: MachineError for a read error, DamagedBundleError where the file ends too early; both name file,
        offset and size.  After a KeyboardInterrupt nothing but `close` is defined.
        """

    def close(self) -> None:
        """Wait for what is in flight, drop what is not started, close the files; a second time does nothing.

        Holds Ctrl-C back meanwhile."""


class Batch:
    """The reads of one tag: how many pieces are still to come, and the first error."""

    __slots__ = ("error", "left")

    def __init__(self) -> None:
        self.left = 0
        self.error: Exception | None = None

    def end(self, error: Exception | None) -> None:
        """One piece is done with."""
        self.error = self.error or error
        self.left -= 1


class Piece:
    """A part of a read that is handed to the kernel as one; it moves on when the kernel brings only its beginning."""

    __slots__ = ("address", "batch", "file", "offset_bytes", "size_bytes", "tries")

    def __init__(self, batch: Batch, file: int, offset_bytes: int, size_bytes: int, address: int) -> None:
        self.batch, self.file = batch, file
        self.offset_bytes, self.size_bytes, self.address = offset_bytes, size_bytes, address
        self.tries = 0

    def advance(self, count: int, step_bytes: int) -> bool:
        """Note that `count` bytes came; whether it got further.  What goes on must begin at a multiple of `step_bytes`."""
        whole = count if count == self.size_bytes else count - count % step_bytes
        self.offset_bytes += whole
        self.address += whole
        self.size_bytes -= whole
        return whole > 0


class Batches:
    """The tags that were submitted and not waited for."""

    def __init__(self, n_files: int, piece_bytes: int, step_bytes: int) -> None:
        self._n_files, self._step = n_files, step_bytes
        self._piece_bytes = align_up(piece_bytes, PAGE_BYTES)
        self._by_tag: dict[int, Batch] = {}

    def add(self, reads: Sequence[Read], tag: int) -> list[Piece]:
        """The pieces of reads, counted under their tag.  Raises ValueError for a read that cannot be."""
        for read in reads:
            if (read.offset_bytes | read.size_bytes | read.address) % self._step or not 0 <= read.file < self._n_files:
                raise ValueError(f"{read}: file of {self._n_files}, numbers of bytes in steps of {self._step}")
        batch = self._by_tag.setdefault(tag, Batch())
        pieces = [piece for read in reads for piece in self._split(read, batch)]
        batch.left += len(pieces)
        return pieces

    def _split(self, read: Read, batch: Batch) -> list[Piece]:
        """Equal parts, none above the limit: a small rest would be one more request for little."""
        size = read.size_bytes
        if size <= self._piece_bytes:
            return [Piece(batch, read.file, read.offset_bytes, size, read.address)] if size else []
        part = align_up(-(-size // -(-size // self._piece_bytes)), PAGE_BYTES)
        return [
            Piece(batch, read.file, read.offset_bytes + at, min(part, size - at), read.address + at)
            for at in range(0, size, part)
        ]

    def of(self, tag: int) -> Batch:
        """The reads of a tag.  Raises ValueError for one that was not submitted."""
        if tag not in self._by_tag:
            raise ValueError(f"no reads were submitted under tag {tag}")
        return self._by_tag[tag]

    def close(self, tag: int) -> None:
        """Forget a tag whose reads are complete.  Raises the error of the first that failed."""
        error = self._by_tag.pop(tag).error
        if error is not None:
            raise error


def read_error(path: str, piece: Piece, error: OSError) -> MachineError:
    """What a failed read raises, with the OSError as its cause."""
    raised = MachineError(
        f"reading {piece.size_bytes} bytes failed: {error.strerror}",
        path=path,
        offset_bytes=piece.offset_bytes,
        hint="Look at the kernel's log for errors of the disk",
    )
    raised.__cause__ = error
    return raised


def short_read(path: str, piece: Piece, count: int) -> BelError:
    """What a read behind the end of a file raises."""
    return DamagedBundleError(
        f"the file ends within the {piece.size_bytes} bytes to be read",
        path=path,
        offset_bytes=piece.offset_bytes,
        found=f"{count} bytes",
        expected=f"{piece.size_bytes} bytes",
        hint="It was cut short after it was opened, or is not complete; `bel-repack verify` checks a bundle",
    )
