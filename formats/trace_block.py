"""The columns of one block of a trace, decoded and checked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

from bel.formats.trace_header import TraceHeader
from bel.formats.trace_layout import COLUMNS, BlockHead


@dataclass(frozen=True, slots=True)
class Block:
    """The calls of one block in the order of appending (C calls, R rows).

    `phase` (C,) u8, `place` (C,) u16 is the index into the header's layers, `ubatch` (C,) i64, `rows` (C,) u32, `times`
    (C,) i64 ns (-1 where not taken) or None.  `token` (R,) i64, `ids` u16 and `weights` f16 (flat) stand layer by layer.
    """

    phase: npt.NDArray[np.uint8]
    place: npt.NDArray[np.uint16]
    ubatch: npt.NDArray[np.int64]
    rows: npt.NDArray[np.uint32]
    token: npt.NDArray[np.int64]
    ids: npt.NDArray[np.uint16]
    weights: npt.NDArray[np.float16] | None
    times: npt.NDArray[np.int64] | None


def decode_block(head: BlockHead, payload: bytes, header: TraceHeader, *, weights: bool) -> Block:
    """The columns of a block, each of the length that the head claims and every id within its layer.  Raises ValueError."""
    view, at = memoryview(payload), 0
    frames = {}
    for name, size in zip(COLUMNS, head.column_bytes, strict=True):
        frames[name] = view[at : at + size]
        at += size
    want = {"weights": header.has_weights, "times": header.has_times}
    for name, is_there in want.items():
        if bool(len(frames[name])) != is_there:
            raise ValueError(f"the column {name} is not what the header says")
    place = np.frombuffer(_unpack(frames["layer"], 2 * head.calls), "<u2")
    rows = np.frombuffer(_unpack(frames["rows"], 4 * head.calls), "<u4")
    block = Block(
        phase=np.frombuffer(_unpack(frames["phase"], head.calls), "u1"),
        place=place,
        ubatch=np.cumsum(np.frombuffer(_unpack(frames["ubatch"], 8 * head.calls), "<i8")),
        rows=rows,
        token=np.cumsum(np.frombuffer(_unpack(frames["token"], 8 * head.rows), "<i8")),
        ids=join_planes(_unpack(frames["ids"], 2 * head.ids)),
        weights=join_planes(_unpack(frames["weights"], 2 * head.ids)).view(np.float16)
        if weights and header.has_weights
        else None,
        times=np.frombuffer(_unpack(frames["times"], 8 * head.calls), "<i8") if header.has_times else None,
    )
    _check(block, head, header)
    return block


def _unpack(frame: memoryview, size_bytes: int) -> bytes:
    """One Zstandard frame of exactly `size_bytes`."""
    data = bytes(frame)
    if zstandard.frame_content_size(data) != size_bytes:
        raise ValueError(f"a column does not unpack to {size_bytes} bytes")
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=size_bytes, allow_extra_data=False)


def join_planes(data: bytes) -> npt.NDArray[np.uint16]:
    planes = np.frombuffer(data, "u1").reshape(2, -1)
    values: npt.NDArray[np.uint16] = planes[1].astype(np.uint16)
    values <<= 8
    values |= planes[0]
    return values


def _check(block: Block, head: BlockHead, header: TraceHeader) -> None:
    if int(block.phase.max()) > 1 or int(block.place.max()) >= len(header.layers) or int(block.rows.min()) < 1:
        raise ValueError("a call has no such phase or layer, or no rows")
    if int(block.ubatch.min()) < 0 or int(block.token.min()) < 0:
        raise ValueError("an ubatch or a token is negative")
    if block.times is not None and int(block.times.min()) < -1:
        raise ValueError("a layer time is negative")
    rows, ids = layer_extents(block, header)
    if int(rows[-1]) != head.rows or int(ids[-1]) != head.ids:
        raise ValueError("the calls do not add up to its rows and ids")
    for place in np.unique(block.place):
        info = header.layers[place]
        if int(block.ids[ids[place] : ids[place + 1]].max()) >= info.n_expert:
            raise ValueError(f"layer {info.layer} names an expert that is out of range, 0 to {info.n_expert - 1}")


def layer_extents(block: Block, header: TraceHeader) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where each layer's rows and ids begin in the block, (layers + 1,) i64 each."""
    top_k = np.array([x.top_k for x in header.layers], np.int64)
    # Sums of u32 over at most 2^20 calls stay far below 2^53, so that the doubles of bincount are exact.
    rows = np.bincount(block.place, weights=block.rows, minlength=len(top_k)).astype(np.int64)
    zero = np.zeros(1, np.int64)
    return np.concatenate([zero, np.cumsum(rows)]), np.concatenate([zero, np.cumsum(rows * top_k)])
