"""Sizes in bytes: reading them from a command line, and showing them to a person."""

from __future__ import annotations

import re

from bel.formats.errors import UsageError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_BINARY = {"k": KIB, "m": MIB, "g": GIB, "t": TIB}
_FACTORS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_FACTORS |= _BINARY | {f"{unit}ib": factor for unit, factor in _BINARY.items()}
_SIZE = re.compile(r"^(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]*)\Z", re.ASCII)


def parse_bytes(text: str) -> int:
    """`12G` and `12GiB` are 12 * 2^30 bytes, `12GB` is 12 * 10^9, a bare number is bytes.  Raises UsageError."""
    match = _SIZE.match(text.strip().lower())
    factor = _FACTORS.get(match.group(2)) if match else None
    if match is None or factor is None:
        raise UsageError(f"'{text}' is not a size", hint="Write 12G (GiB), 12GB (10^9 bytes), 700M or a number of bytes")
    return int(float(match.group(1)) * factor) if "." in match.group(1) else int(match.group(1)) * factor


def format_bytes(count: int) -> str:
    """`count` bytes in the largest binary unit that keeps at least one whole: '1.95 GiB'."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} B"


def align_up(count: int, alignment: int) -> int:
    """The smallest multiple of `alignment` (a positive integer) that is at least `count`."""
    return -(-count // alignment) * alignment
