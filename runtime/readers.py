"""The best reader that this machine has for some files, and why it is no better one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bel.formats.errors import MachineError, UsageError
from bel.formats.units import MIB
from bel.runtime.reader_files import ReaderFiles, RefusedError
from bel.runtime.reader_threads import ThreadsReader
from bel.runtime.reader_uring import UringReader
from bel.runtime.reads import Reader

__all__ = ["DEPTH", "KINDS", "PIECE_BYTES", "Reader", "open_reader"]

KINDS = ("io_uring", "threads", "buffered")
"""Best first."""
DEPTH = 16
PIECE_BYTES = MIB
"""About one request of a disk.  From 0.3 to 4 MiB no size measured clearly better, for blobs one by one or in a stream."""


def open_reader(paths: Sequence[Path], *, kind: str = "auto", depth: int = DEPTH, piece_bytes: int = PIECE_BYTES) -> Reader:
    """Open files for reading by 'io_uring', 'threads' or 'buffered', or by the first of them that a real read proves.

    `depth` is the number of threads, so of reads in flight; an io_uring has up to 256 in flight whatever it says.  Reads
    above `piece_bytes` are split into equal parts.  Raises UsageError for an unknown kind or a depth below 1; MachineError for
    a kind that is asked for and not to be had here, and for a file that cannot be opened or read.
    """
    if kind not in ("auto", *KINDS):
        raise UsageError(f"there is no reader '{kind}'", expected=", ".join(("auto", *KINDS)))
    if depth < 1 or piece_bytes < 1:
        raise UsageError("a reader needs a depth and pieces of at least 1", found=f"{depth} and {piece_bytes} bytes")
    if kind != "auto":
        return _forced(paths, kind, depth, piece_bytes)
    refusals: list[str] = []
    for name in KINDS:
        try:
            return _open(paths, name, depth, piece_bytes, "; ".join(refusals))
        except RefusedError as refusal:
            if str(refusal) not in refusals:
                refusals.append(str(refusal))
    raise AssertionError("reads through the page cache are never refused")


def _forced(paths: Sequence[Path], kind: str, depth: int, piece_bytes: int) -> Reader:
    why = "" if kind == KINDS[0] else "it was asked for"
    try:
        return _open(paths, kind, depth, piece_bytes, why)
    except RefusedError as refusal:
        raise MachineError(
            f"the reader {kind} was asked for and cannot be had: {refusal}", hint="Let the best one be chosen: --reader auto"
        ) from refusal


def _open(paths: Sequence[Path], kind: str, depth: int, piece_bytes: int, why: str) -> Reader:
    files = ReaderFiles(paths, is_direct=kind != "buffered")
    try:
        if kind == "io_uring":
            return UringReader(files, piece_bytes=piece_bytes, why=why)
        return ThreadsReader(files, n_threads=depth, piece_bytes=piece_bytes, why=why)
    except BaseException:
        files.close()
        raise
