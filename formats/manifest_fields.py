"""Typed, bounded reading of JSON fields that came from a file."""

from __future__ import annotations

import re
from typing import Any

from bel.formats.experts import ROLES
from bel.formats.experts_file import PAGE_BYTES, PART_ALIGNMENT, BlobPart, LayerLayout

MAX_INT = 2**63 - 1
_HEX64 = re.compile(r"^[0-9a-f]{64}\Z", re.ASCII)


def read_int(row: dict[Any, Any], key: object) -> int:
    """A non-negative integer below 2^63.  Raises ValueError."""
    value = row[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_INT:
        raise ValueError(f"{key} is not a non-negative integer")
    return value


def read_ints(row: dict[Any, Any], key: str, at_most: int) -> tuple[int, ...]:
    """A list of at most `at_most` integers as `read_int` takes them.  Raises ValueError."""
    values = read_list(row, key)
    if len(values) > at_most:
        raise ValueError(f"{key} has more than {at_most} entries")
    numbered = dict(enumerate(values))
    return tuple(read_int(numbered, i) for i in numbered)


def read_text(row: dict[str, Any], key: str) -> str:
    """A string.  Raises ValueError."""
    value = row[key]
    if not isinstance(value, str):
        raise ValueError(f"{key} is not a string")
    return value


def read_list(row: dict[str, Any], key: str) -> list[Any]:
    """A list.  Raises ValueError."""
    value = row[key]
    if not isinstance(value, list):
        raise ValueError(f"{key} is not a list")
    return value


def read_map(row: dict[str, Any], key: str) -> dict[str, Any]:
    """An object.  Raises ValueError."""
    value = row[key]
    if not isinstance(value, dict):
        raise ValueError(f"{key} is not an object")
    return value


def read_digest(row: dict[str, Any], key: str) -> str:
    """64 lower-case hex digits.  Raises ValueError."""
    value = read_text(row, key)
    if not _HEX64.match(value):
        raise ValueError(f"{key} is not a digest")
    return value


def plain_name(name: str) -> str:
    """`name`, which must be a bare file name: a bundle from a stranger must not reach outside its folder."""
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"'{name}' is not a plain file name")
    return name


def layer_to_json(layer: LayerLayout) -> dict[str, Any]:
    """A layer's layout as a JSON object."""
    return {
        "n_expert": layer.n_expert,
        "n_used": layer.n_used,
        "is_mtp": layer.is_mtp,
        "shard": layer.shard,
        "offset": layer.offset_bytes,
        "stride": layer.stride_bytes,
        "parts": [{"role": p.role, "tensor": p.tensor, "offset": p.offset_bytes, "bytes": p.size_bytes} for p in layer.parts],
    }


def layer_from_json(layer: int, row: dict[str, Any], tensor_bytes: list[int], file_bytes: list[int]) -> LayerLayout:
    """A layer's layout, with every offset inside its blob and every blob inside its file.  Raises ValueError or KeyError."""
    parts = tuple(
        BlobPart(read_text(p, "role"), read_int(p, "tensor"), read_int(p, "offset"), read_int(p, "bytes"))
        for p in read_list(row, "parts")
    )
    used = row["n_used"]
    layout = LayerLayout(
        layer,
        read_int(row, "n_expert"),
        None if used is None else read_int(row, "n_used"),
        row["is_mtp"] is True,
        read_int(row, "shard"),
        read_int(row, "offset"),
        read_int(row, "stride"),
        parts,
    )
    _check_layer(layout, tensor_bytes, file_bytes)
    return layout


def _check_layer(layout: LayerLayout, tensor_bytes: list[int], file_bytes: list[int]) -> None:
    where = f"layer {layout.layer}"
    if layout.n_expert < 1 or layout.stride_bytes < 1 or layout.shard >= len(file_bytes) or not layout.parts:
        raise ValueError(f"{where} has no experts, no stride, no parts or no file")
    if layout.offset_bytes % PAGE_BYTES or layout.stride_bytes % PAGE_BYTES or layout.offset_bytes < PAGE_BYTES:
        raise ValueError(f"{where} is not aligned to {PAGE_BYTES} bytes")
    if layout.offset_bytes + layout.size_bytes > file_bytes[layout.shard]:
        raise ValueError(f"{where} ends behind its experts file")
    if layout.n_used is not None and not 1 <= layout.n_used <= layout.n_expert:
        raise ValueError(f"{where} uses {layout.n_used} of {layout.n_expert} experts")
    at = 0
    for part in layout.parts:
        if part.role not in ROLES or part.offset_bytes < at or part.offset_bytes % PART_ALIGNMENT:
            raise ValueError(f"{where} has a part out of place")
        if part.tensor >= len(tensor_bytes) or tensor_bytes[part.tensor] != part.size_bytes * layout.n_expert:
            raise ValueError(f"{where} has a part that is not its tensor's slice")
        at = part.offset_bytes + part.size_bytes
    if at > layout.stride_bytes:
        raise ValueError(f"{where} has parts larger than its stride")
