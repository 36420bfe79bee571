"""Writing a trace: the router's choices of one run, appended block by block while the run goes on.

`SPEC.md`, "Trace", has the layout, `trace_layout.py` its structs, `trace_reader.py` the way back.  The same appends give
the same bytes: nothing of the clock, the machine or the folder goes into the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import zstandard

from bel.formats.atomic import fsync_folder, named_errors, write_all
from bel.formats.errors import BadInputError, MachineError, UsageError
from bel.formats.trace_header import TraceHeader, TraceLayer, encode_header
from bel.formats.trace_layout import (
    BLOCK_MARK,
    COLUMNS,
    DIGEST_BYTES,
    END_MARK,
    FILE_HEAD,
    MAX_BLOCK_IDS,
    MAX_BLOCK_ROWS,
    BlockHead,
    pack_file_head,
    short_digest,
)

PROMPT, DECODE = 0, 1
PHASES = {"decode": (DECODE,), "prompt": (PROMPT,), "all": (PROMPT, DECODE)}
"""What a command's `--phase` counts."""
NO_TIME = -1
# A kill costs at most one block: 32 Ki ids are 85 tokens of 48 layers with 8 experts each, and 4096 calls as many.
BLOCK_IDS = 1 << 15
BLOCK_CALLS = 1 << 12
_LEVEL = 6  # ids are close to random: higher levels cost time and gain nothing


@dataclass(slots=True)
class _Pending:
    """The calls of the block that is being filled, and the rows of each layer apart."""

    phase: list[int] = field(default_factory=list)
    layer: list[int] = field(default_factory=list)
    ubatch: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    token: dict[int, list[npt.NDArray[np.int64]]] = field(default_factory=dict)
    ids: dict[int, list[npt.NDArray[np.uint16]]] = field(default_factory=dict)
    weights: dict[int, list[npt.NDArray[np.float16]]] = field(default_factory=dict)
    id_count: int = 0
    row_count: int = 0


class TraceWriter:
    """Append calls of the router to a new file.

    Each call is one (layer, ubatch).  A block is written, and made durable where `sync` is true, when it is full, on
    `flush` and on `close`; a run that dies loses what came after the last one.  `close` (and the end of a `with`, also on
    an exception such as Ctrl-C) writes what is pending and the end mark, so that a reader knows that nothing is missing.

    An existing file is refused with UsageError, or with `replace` taken away first; it is never truncated in place.
    """

    def __init__(self, path: Path, header: TraceHeader, *, replace: bool = False, sync: bool = True) -> None:
        head = pack_file_head(encode_header(header))
        self.path, self.header = path, header
        self._run_digest = head[FILE_HEAD.size - DIGEST_BYTES : FILE_HEAD.size]
        self._places = {row.layer: i for i, row in enumerate(header.layers)}
        self._compress = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True, write_checksum=False).compress
        self._sync = sync
        self._pending = _Pending()
        self._end_bytes, self._blocks = len(head), 0
        self._fd = _create(path, replace=replace)
        try:
            with named_errors(path):
                write_all(self._fd, memoryview(head), 0)
                self._settle()
            if sync:
                fsync_folder(path.parent)
        except BaseException:  # a file without its header is no trace, and would stand in the way of the next run
            os.close(self._fd)
            path.unlink()
            raise

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def append(
        self,
        *,
        phase: int,
        ubatch: int,
        layer: int,
        tokens: npt.NDArray[np.int64],
        ids: npt.NDArray[np.uint16],
        weights: npt.NDArray[np.float16] | None = None,
        time_ns: int | None = None,
    ) -> None:
        """Add one call: the experts that `layer` chose for the n rows of one ubatch.  The arrays are copied.

        `phase` is PROMPT or DECODE.  `ubatch` counts the ubatches of the run and never falls.  `tokens` (n,) are positions
        in the sequence: a new prompt starts again at 0.  `ids` (n, top_k) are in slot order, highest score first.
        `weights` (n, top_k) belong to the ids; they are there in every call or in none, as the header says.  `time_ns` is
        the time of the layer, None where it was not taken.

        Raises BadInputError where an id is not one of the layer's experts, ValueError for arrays of the wrong shape.
        """
        place = self._places.get(layer)
        if place is None:
            raise BadInputError(f"layer {layer} is not in the header of the trace", path=str(self.path))
        row = self.header.layers[place]
        _check_call(row, phase, ubatch, tokens, ids)
        if ids.size and int(ids.max()) >= row.n_expert:
            raise BadInputError(
                f"layer {layer} names an expert out of range",
                path=str(self.path),
                found=int(ids.max()),
                expected=f"0 to {row.n_expert - 1}",
            )
        if (weights is not None) != self.header.has_weights or (weights is not None and weights.shape != ids.shape):
            raise ValueError("weights come with every call and in the shape of the ids, or with none")
        pending = self._pending
        if pending.id_count and (pending.id_count + ids.size > MAX_BLOCK_IDS or pending.row_count + len(ids) > MAX_BLOCK_ROWS):
            self.flush()
            pending = self._pending
        pending.token.setdefault(place, []).append(np.array(tokens, dtype="<i8"))
        pending.ids.setdefault(place, []).append(np.array(ids, dtype="<u2"))
        if weights is not None:
            pending.weights.setdefault(place, []).append(np.array(weights, dtype="<f2"))
        pending.phase.append(phase)
        pending.layer.append(place)
        pending.ubatch.append(ubatch)
        pending.rows.append(len(ids))
        pending.times.append(NO_TIME if time_ns is None else time_ns)
        pending.id_count += ids.size
        pending.row_count += len(ids)
        if pending.id_count >= BLOCK_IDS or len(pending.rows) >= BLOCK_CALLS:
            self.flush()

    def flush(self) -> None:
        """End the block and make it durable.  Nothing happens where nothing is pending."""
        if self._pending.rows:
            self._write_block(self._block(), _Pending())

    def close(self) -> None:
        """Write what is pending and the end mark, make all durable, and close.  A second call does nothing."""
        if self._fd < 0:
            return
        try:
            self.flush()
            mark = BlockHead(END_MARK, self._blocks, 0, 0, 0, (0,) * len(COLUMNS), short_digest(b""))
            with named_errors(self.path):
                write_all(self._fd, memoryview(mark.pack(self._run_digest)), self._end_bytes)
                os.fsync(self._fd)
        finally:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _block(self) -> bytes:
        """Head and columns of the pending calls.  Rows, ids and weights stand layer by layer, the calls as appended."""
        p = self._pending
        layers = sorted(p.ids)
        tokens = np.concatenate([t for place in layers for t in p.token[place]])
        ids = np.concatenate([x.ravel() for place in layers for x in p.ids[place]])
        weights = [x.ravel() for place in layers for x in p.weights[place]] if self.header.has_weights else []
        raw = {
            "phase": np.array(p.phase, "u1").tobytes(),
            "layer": np.array(p.layer, "<u2").tobytes(),
            "ubatch": np.diff(np.array(p.ubatch, "<i8"), prepend=0).tobytes(),
            "rows": np.array(p.rows, "<u4").tobytes(),
            "token": np.diff(tokens, prepend=0).astype("<i8").tobytes(),
            "ids": byte_planes(ids),
            "weights": byte_planes(np.concatenate(weights)) if weights else b"",
            "times": np.array(p.times, "<i8").tobytes() if self.header.has_times else b"",
        }
        packed = [self._compress(raw[name]) if raw[name] else b"" for name in COLUMNS]
        payload = b"".join(packed)
        sizes = tuple(map(len, packed))
        head = BlockHead(BLOCK_MARK, self._blocks, len(p.rows), len(tokens), ids.size, sizes, short_digest(payload))
        return head.pack(self._run_digest) + payload

    def _write_block(self, block: bytes, fresh: _Pending) -> None:
        with named_errors(self.path):
            write_all(self._fd, memoryview(block), self._end_bytes)
            # An interrupt before this line leaves the calls pending: they are written again, to the same place.
            self._end_bytes, self._blocks, self._pending = self._end_bytes + len(block), self._blocks + 1, fresh
            self._settle()

    def _settle(self) -> None:
        if self._sync:
            os.fdatasync(self._fd)


def byte_planes(values: npt.NDArray[np.uint16] | npt.NDArray[np.float16]) -> bytes:
    """The low bytes of all values, then the high bytes: for up to 256 experts the second half is zero and costs nothing."""
    return values.view("u1").reshape(-1, 2).T.tobytes()


def _create(path: Path, *, replace: bool) -> int:
    if replace:
        _refuse_busy(path)
        path.unlink(missing_ok=True)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        raise UsageError("the trace exists already", path=str(path), hint="Use --force to replace it") from None
    with contextlib.suppress(OSError):  # a file system without locks: then only the check for an existing file protects
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def _refuse_busy(path: Path) -> None:
    """Raise MachineError where another process is writing the trace: replacing it would lose that recording unseen."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise MachineError("another recording is writing this trace at this moment", path=str(path)) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
            raise
    finally:
        os.close(fd)


def _check_call(row: TraceLayer, phase: int, ubatch: int, tokens: npt.NDArray[np.int64], ids: npt.NDArray[np.uint16]) -> None:
    if ids.dtype != np.uint16 or ids.ndim != 2 or ids.shape[1] != row.top_k or not len(ids):
        raise ValueError(f"layer {row.layer}: ids are {ids.dtype} {ids.shape}, not uint16 (n, {row.top_k})")
    if ids.size > MAX_BLOCK_IDS or len(ids) > MAX_BLOCK_ROWS:
        raise ValueError(f"layer {row.layer}: a call of {len(ids)} rows is too large")
    if tokens.shape != (len(ids),) or tokens.dtype != np.int64 or int(tokens.min()) < 0:
        raise ValueError(f"layer {row.layer}: tokens are {tokens.dtype} {tokens.shape}, not int64 ({len(ids)},) from 0")
    if phase not in (PROMPT, DECODE) or not 0 <= ubatch < 1 << 62:
        raise ValueError(f"phase {phase} or ubatch {ubatch} is out of range")


__all__ = ["DECODE", "NO_TIME", "PROMPT", "TraceHeader", "TraceLayer", "TraceWriter", "byte_planes"]
