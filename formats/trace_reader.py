"""Reading a trace back block by block.

A trace is read as hostile input.  `SPEC.md`, "Trace", says what a damaged field costs: a torn tail the last block, any
other damage the whole file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import zstandard

from bel.formats.atomic import named_errors, read_all
from bel.formats.errors import BadInputError
from bel.formats.trace_block import Block, decode_block
from bel.formats.trace_header import TraceHeader, decode_header
from bel.formats.trace_layout import (
    BLOCK_HEAD,
    BLOCK_MARK,
    DIGEST_BYTES,
    END_MARK,
    FILE_HEAD,
    MAGIC,
    MAX_HEADER_BYTES,
    READABLE_VERSIONS,
    BlockHead,
    short_digest,
    unpack_block_head,
)


class TraceReader:
    """An open trace.  Iterate `blocks` to its end; then `notes` says what the file lacks.

    Raises BadInputError where it is not a trace, is of another version, or is damaged anywhere but at its tail.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not hang the open
        try:
            with named_errors(path):
                self.header, self._start_bytes, self._run_digest = self._read_head()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read_head(self) -> tuple[TraceHeader, int, bytes]:
        state = os.fstat(self._fd)
        if not stat.S_ISREG(state.st_mode):
            raise BadInputError("this is not a file", path=str(self.path))
        self._size_bytes = state.st_size  # a recording that goes on meanwhile is read as it is now
        head = read_all(self._fd, FILE_HEAD.size, 0)
        if head[: len(MAGIC)] != MAGIC:
            raise BadInputError(
                "this is not a trace of bel-profile", path=str(self.path), hint="bel-profile import reads others"
            )
        if len(head) < FILE_HEAD.size:
            raise self._bad("the head of the trace is cut off", 0)
        _, version, size, digest = FILE_HEAD.unpack(head)
        if version not in READABLE_VERSIONS:
            raise BadInputError(
                f"trace version {version} is not supported; this toolkit reads {', '.join(map(str, READABLE_VERSIONS))}",
                path=str(self.path),
                hint="Upgrade bel-toolkit if the trace is newer",
            )
        if size > MAX_HEADER_BYTES or FILE_HEAD.size + size > self._size_bytes:
            raise self._bad("the header of the trace is cut off, or its length is damaged", 12)
        body = read_all(self._fd, size, FILE_HEAD.size)
        if short_digest(head[:-DIGEST_BYTES] + body) != digest:
            raise self._bad("the header of the trace is damaged: its checksum does not match", FILE_HEAD.size)
        try:
            return decode_header(body), FILE_HEAD.size + size, digest
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise self._bad(f"the header of the trace is not valid: {error}", FILE_HEAD.size) from None

    def blocks(self, *, weights: bool = False) -> Iterator[Block]:
        """The blocks in order; `weights` decodes that column too.  A torn last block is left out, and noted."""
        at, number = self._start_bytes, 0
        while True:
            found = self._read_block(at, number)
            if found is None:
                return
            head, payload = found
            at += BLOCK_HEAD.size + head.payload_bytes
            try:
                block = decode_block(head, payload, self.header, weights=weights)
            except (ValueError, zstandard.ZstdError) as error:
                raise self._bad(f"block {number} of the trace is not valid: {error}", at) from None
            yield block
            number += 1

    def _read_block(self, at: int, number: int) -> tuple[BlockHead, bytes] | None:
        """Head and payload of the block at byte `at`, or None at the end of the trace."""
        if at == self._size_bytes:
            self.notes.append("the recording was not closed in order; what came after its last block is lost")
            return None
        with named_errors(self.path):
            raw = read_all(self._fd, BLOCK_HEAD.size, at)
        head = unpack_block_head(raw, self._run_digest) if len(raw) == BLOCK_HEAD.size else None
        if head is None:
            if len(raw) < BLOCK_HEAD.size or self._is_zero_from(at):
                self._note_torn(at, number)
                return None
            raise self._bad(f"the head of block {number} of the trace is damaged, or of another run", at)
        end = at + BLOCK_HEAD.size + head.payload_bytes
        if head.number != number or head.mark not in (BLOCK_MARK, END_MARK):
            raise self._bad(f"block {number} of the trace is out of its place", at)
        if head.mark == END_MARK:
            if end != self._size_bytes:
                raise self._bad("bytes follow the end of the trace", end)
            return None
        if not head.is_bounded:
            raise self._bad(f"block {number} claims {head.calls} calls, {head.rows} rows and {head.ids} ids", at)
        if end > self._size_bytes:
            self._note_torn(at, number)
            return None
        with named_errors(self.path):
            payload = read_all(self._fd, head.payload_bytes, at + BLOCK_HEAD.size)
        if short_digest(payload) != head.payload_digest:
            if end == self._size_bytes:
                self._note_torn(at, number)
                return None
            raise self._bad(f"block {number} of the trace is damaged: its checksum does not match", at)
        return head, payload

    def _note_torn(self, at: int, number: int) -> None:
        lost = self._size_bytes - at
        self.notes.append(
            f"the trace is torn: it ends inside block {number}; its last {lost} bytes are dropped (from byte {at})"
        )

    def _is_zero_from(self, at: int) -> bool:
        """Whether the file holds nothing but zeros from `at` on, as after a loss of power."""
        while at < self._size_bytes:
            part = read_all(self._fd, 1 << 20, at)
            if part.count(0) != len(part) or not part:
                return False
            at += len(part)
        return True

    def _bad(self, cause: str, offset_bytes: int) -> BadInputError:
        return BadInputError(cause, path=str(self.path), offset_bytes=offset_bytes)
