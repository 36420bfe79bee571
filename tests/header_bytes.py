"""GGUF headers made field by field, with counts that may lie."""

from __future__ import annotations

import struct

import synth
from synth import ARRAY, F32, STRING, U32, Gguf, Tensor, gguf_string, key

FLOAT32, FLOAT64, U8 = 6, 12, 0


def info(name: str | bytes, ne: tuple[int, ...] = (32,), type_id: int = F32, offset: int = 0, dims: int | None = None) -> bytes:
    """A tensor info; `dims` is the dimension count that it claims."""
    head = gguf_string(name) + struct.pack("<I", len(ne) if dims is None else dims)
    return head + struct.pack(f"<{len(ne)}QIQ", *ne, type_id, offset)


def head(
    entries: list[bytes] | None = None,
    infos: list[bytes] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    keys: int | None = None,
    tensors: int | None = None,
    body: int = 4096,
) -> bytes:
    """A file whose counts may lie, with `body` zero bytes behind the header."""
    entries, infos = entries or [], infos or []
    counts = (len(infos) if tensors is None else tensors, len(entries) if keys is None else keys)
    return struct.pack("<4sIQQ", magic, version, *counts) + b"".join(entries + infos) + bytes(body)


def nested(depth: int) -> object:
    """The value of arrays inside one another, `depth` of them, around the u32 7."""
    item: tuple[int, list[object]] = (U32, [7])
    for _ in range(depth - 1):
        item = (ARRAY, [item])
    return item


START = 24  # magic, version and the two counts
ARCH = key("general.architecture", STRING, "x")


def small() -> Gguf:
    """A file with every kind of field."""
    entries = [
        *synth.moe_entries(layers=1),
        key("x.u8", U8, 1),
        key("x.f64", FLOAT64, 0.5),
        key("x.nested", ARRAY, nested(3)),
        key("x.strings", ARRAY, (STRING, ["", "ab"])),
    ]
    return Gguf(entries, [Tensor("a", (32,), F32, gap_bytes=32), *synth.expert_stacks(0, 2), Tensor("z", (5,), F32)])
