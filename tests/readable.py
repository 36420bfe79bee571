"""Files to read, memory to read them into, and a reader of each kind that the machine has."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bel.formats.errors import MachineError
from bel.runtime.readers import KINDS, open_reader
from bel.runtime.reads import PAGE_BYTES

FILE_PAGES = 1024
TAIL_BYTES = 777  # the file ends within a page
SMALL_PIECE = 3 * PAGE_BYTES
DIRECT = KINDS[:2]


class Memory:
    """Anonymous memory with an address."""

    def __init__(self, size_bytes: int) -> None:
        self._map = mmap.mmap(-1, size_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.size_bytes = size_bytes

    def bytes_at(self, address: int, size_bytes: int) -> bytes:
        return ctypes.string_at(address, size_bytes)

    def fill(self, value: int) -> None:
        ctypes.memset(self.address, value, self.size_bytes)


@contextlib.contextmanager
def reader_of(paths: list[Path], kind: str, **options: int) -> Iterator[Any]:
    """A reader of this kind; the test is skipped where the machine has none."""
    try:
        reader = open_reader(paths, kind=kind, **options)
    except MachineError as error:
        if "cannot be had" not in str(error):
            raise
        pytest.skip(str(error))
    with contextlib.closing(reader):
        assert reader.name == kind
        yield reader


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def random_files(folder: Path) -> list[Path]:
    """Two files of random bytes, on the disk."""
    paths, rng = [], random.Random(11)
    for number in range(2):
        paths.append(folder / f"part-{number}.bin")
        with paths[-1].open("wb") as file:
            file.write(rng.randbytes(FILE_PAGES * PAGE_BYTES + TAIL_BYTES))
            file.flush()
            os.fsync(file.fileno())
    return paths
