"""The names of the nodes that the compiled callback looks for, as a table by their hash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bel.runtime.cache_rows import Ints
from bel.runtime.pool_rows import MOST_WORDS, NAME_CAPACITY

_MIN_NAMES = 16
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class NameTable:
    """Open addressing, a quarter full at most: `keys` u64 and `values` i64 (size,), -1 where there is none, and `text` u8
    (size, NAME_CAPACITY), ended by zeros.

    `starts` i64 (MOST_WORDS,): the first 8 bytes of all names, some of them several times; None where there are too many, or a
    name is shorter.
    """

    keys: npt.NDArray[np.uint64]
    values: Ints
    text: npt.NDArray[np.uint8]
    starts: Ints | None


def name_table(names: Mapping[bytes, int]) -> NameTable:
    """A table of names and what they stand for, numbers from 0."""
    size = _MIN_NAMES
    while size < 4 * len(names):
        size *= 2
    keys, values = np.zeros(size, np.uint64), np.full(size, -1, np.int64)
    text = np.zeros((size, NAME_CAPACITY), np.uint8)
    for name, value in names.items():
        key = name_hash(name)
        place = key & (size - 1)
        while values[place] >= 0:
            place = (place + 1) & (size - 1)
        keys[place], values[place] = key, value
        text[place, : len(name)] = np.frombuffer(name, np.uint8)
    return NameTable(keys, values, text, _starts(names))


def _starts(names: Mapping[bytes, int]) -> Ints | None:
    starts = sorted({name[:_WORD_BYTES] for name in names})
    if len(starts) > MOST_WORDS or any(len(start) < _WORD_BYTES for start in starts):
        return None
    return np.frombuffer(b"".join((starts * MOST_WORDS)[:MOST_WORDS]), np.int64).copy()


def name_hash(name: bytes) -> int:
    """FNV-1a, 64 bits (G. Fowler, L. C. Noll, K.-P. Vo)."""
    key = 0xCBF29CE484222325
    for byte in name:
        key = (key ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return key
