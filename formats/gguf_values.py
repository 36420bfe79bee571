"""GGUF metadata values: walking over them without building Python objects, and decoding the few that are asked for.

Source of the layout: ggml/include/gguf.h, lines 1-31 (`enum gguf_type`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable

U32, STRING, ARRAY = 4, 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
SCALAR_BYTES = {type_id: struct.calcsize("<" + code) for type_id, code in _FORMATS.items()}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

MAX_ARRAY_DEPTH = 8
"""llama.cpp refuses any array of arrays; a tower of them is only ever hostile."""

Need = Callable[[bytearray, int], None]
"""`need(buffer, end)` makes the buffer at least `end` bytes long, or raises."""


def skip_value(buffer: bytearray, at: int, type_id: int, need: Need) -> int:
    """The offset just behind the value of `type_id` that starts at `at`.

    Linear in the bytes walked; no object is made per element.  Raises ValueError for an unknown type or for
    arrays nested deeper than MAX_ARRAY_DEPTH, and whatever `need` raises where the bytes end.
    """
    todo = [(type_id, 1, 0)]
    while todo:
        kind, count, depth = todo.pop()
        if kind in SCALAR_BYTES:
            at += SCALAR_BYTES[kind] * count
            need(buffer, at)
        elif kind == STRING:
            at = _skip_strings(buffer, at, count, need)
        elif kind == ARRAY:
            if count > 1:
                todo.append((ARRAY, count - 1, depth))
            if count:
                if depth >= MAX_ARRAY_DEPTH:
                    raise ValueError(f"arrays are nested more than {MAX_ARRAY_DEPTH} deep")
                need(buffer, at + 12)
                todo.append((_U32.unpack_from(buffer, at)[0], _U64.unpack_from(buffer, at + 4)[0], depth + 1))
                at += 12
        else:
            raise ValueError(f"unknown value type {kind}")
    return at


def _skip_strings(buffer: bytearray, at: int, count: int, need: Need) -> int:
    length_at = _U64.unpack_from
    while count:
        need(buffer, at + 8)
        last = len(buffer) - 8
        while count and at <= last:
            at += 8 + length_at(buffer, at)[0]
            count -= 1
    need(buffer, at)
    return at


def read_value(raw: bytes | bytearray, at: int, type_id: int) -> object:
    """Decode the value of `type_id` at offset `at` of a header that `skip_value` has walked already.

    Strings come as str (undecodable bytes as lone surrogates), arrays as lists.
    """
    value, _ = _read(raw, at, type_id)
    return value


def _read(raw: bytes | bytearray, at: int, type_id: int) -> tuple[object, int]:
    if type_id in _FORMATS:
        size = SCALAR_BYTES[type_id]
        if type_id == 7:  # bool is an int8 in the file; any value but 0 is true
            return raw[at] != 0, at + 1
        return struct.unpack_from("<" + _FORMATS[type_id], raw, at)[0], at + size
    if type_id == STRING:
        end = at + 8 + _U64.unpack_from(raw, at)[0]
        return bytes(raw[at + 8 : end]).decode("utf-8", "surrogateescape"), end
    item, count = _U32.unpack_from(raw, at)[0], _U64.unpack_from(raw, at + 4)[0]
    at += 12
    if item in _FORMATS and item != 7:
        end = at + SCALAR_BYTES[item] * count
        return list(struct.unpack_from(f"<{count}{_FORMATS[item]}", raw, at)), end
    items = []
    for _ in range(count):
        value, at = _read(raw, at, item)
        items.append(value)
    return items, at


def string_value(text: str) -> bytes:
    """`text` as the bytes of a GGUF string (u64 length, then the bytes)."""
    data = text.encode("utf-8", "surrogateescape")
    return _U64.pack(len(data)) + data
