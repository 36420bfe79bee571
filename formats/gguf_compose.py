"""Composing the header of a new GGUF from verbatim entries of another one."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from bel.formats.gguf_header import MAGIC, TensorInfo
from bel.formats.gguf_values import STRING, U32, string_value
from bel.formats.units import align_up

_U16, _I32 = 2, 5


@dataclass(frozen=True, slots=True)
class GgufLayout:
    """A GGUF to be written: tensors with final offsets, in file order.

    `offsets_bytes` and `data_start_bytes` are absolute; `size_bytes` includes the padding after the last tensor.
    """

    version: int
    alignment: int
    entries: tuple[bytes, ...]
    tensors: tuple[TensorInfo, ...]
    data_start_bytes: int
    size_bytes: int

    def header(self) -> bytes:
        """The bytes [0, data_start_bytes)."""
        parts = [struct.pack("<4sIQQ", MAGIC, self.version, len(self.tensors), len(self.entries)), *self.entries]
        parts += [_tensor_info(t) for t in self.tensors]
        return b"".join(parts).ljust(self.data_start_bytes, b"\0")


def compose(
    version: int, alignment: int, entries: list[bytes], tensors: list[tuple[str, tuple[int, ...], int, int]]
) -> GgufLayout:
    """Lay out a GGUF: `tensors` are (name, ne, type id, bytes); each placed at the running padded sum, as llama.cpp demands."""
    at, infos = 0, []
    for name, ne, type_id, size in tensors:
        infos.append(TensorInfo(name, ne, type_id, at))
        at = align_up(at + size, alignment)
    length = 24 + sum(map(len, entries)) + sum(len(_tensor_info(t)) for t in infos)
    start = align_up(length, alignment) if infos else length
    return GgufLayout(version, alignment, tuple(entries), tuple(infos), start, start + at)


def _tensor_info(info: TensorInfo) -> bytes:
    head = string_value(info.name) + struct.pack("<I", len(info.ne))
    return head + struct.pack(f"<{len(info.ne)}QIQ", *info.ne, info.type_id, info.offset_bytes)


def string_entry(key: str, value: str) -> bytes:
    """A metadata entry with a string value."""
    return string_value(key) + struct.pack("<I", STRING) + string_value(value)


def u32_entry(key: str, value: int) -> bytes:
    """A metadata entry with a u32 value."""
    return string_value(key) + struct.pack("<II", U32, value)


def u16_entry(key: str, value: int) -> bytes:
    """A metadata entry with a u16 value."""
    return string_value(key) + struct.pack("<IH", _U16, value)


def i32_entry(key: str, value: int) -> bytes:
    """A metadata entry with an i32 value."""
    return string_value(key) + struct.pack("<Ii", _I32, value)
