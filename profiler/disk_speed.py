"""How fast blocks of a file come from the disk, in random order and several at once, and proof that they came from there.

Sources: open(2) on O_DIRECT; Documentation/filesystems/proc.rst of Linux on /proc/PID/io.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import mmap
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bel.formats.errors import MachineError
from bel.formats.experts_file import PAGE_BYTES
from bel.formats.units import GIB
from bel.runtime.readers import open_reader
from bel.runtime.reads import Read, Reader

DEPTHS = (1, 2, 4, 8, 16, 32)
MAX_BUFFER_BYTES = GIB
MAX_BLOCKS = 2**18  # at 4 KiB they are 1 GiB, more than seconds of reads
COUNTED_SHARE = 0.95
"""A direct read is counted to the byte; what is missing was in memory.  The rest is room for a count that lags behind."""
_IO = Path("/proc/self/io")


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """`depths` are (reads in flight, bytes/s); `counted_share` is the part that the kernel counted, None where it does not."""

    depths: tuple[tuple[int, float], ...]
    reader: str
    counted_share: float | None

    @property
    def best_bytes_per_s(self) -> float:
        """The rate of the best depth."""
        return max(rate for _, rate in self.depths)


def measure_disk(
    paths: Sequence[Path], block_bytes: int, *, shown: Path, depths: Sequence[int] = DEPTHS, seconds: float = 1.0, seed: int = 0
) -> DiskSpeed:
    """Read random blocks of the files with direct I/O, for about `seconds` at each depth.

    `block_bytes` is a multiple of 4096; messages name `shown`.  Each block comes once before any comes again, across all
    depths; depths that would have a block in flight twice, or more than 1 GiB of memory, are left out.  Raises MachineError
    where the file system has no direct reads, and where the kernel did not count the bytes as read from a disk.
    """
    blocks = random_blocks(paths, block_bytes, seed)
    usable = [d for d in depths if d == 1 or (2 * d <= len(blocks) and d * block_bytes <= MAX_BUFFER_BYTES)]
    # Anonymous and page-aligned, as direct reads want it; touched, since page faults are not the disk's.
    memory = np.frombuffer(mmap.mmap(-1, max(usable) * block_bytes), np.uint8)
    memory[::PAGE_BYTES] = 1
    addresses = [memory.ctypes.data + slot * block_bytes for slot in range(max(usable))]
    rates, asked, before = [], 0, disk_read_bytes()
    with contextlib.closing(open_direct(paths, max(usable), block_bytes, shown)) as reader:
        order = (Read(file, offset, block_bytes, 0) for file, offset in itertools.cycle(blocks))
        for depth in usable:
            done, took = _read_for(reader, order, addresses[:depth], seconds)
            rates.append((depth, done / took))
            asked += done
    share = check_counted(asked, before, disk_read_bytes(), shown)
    return DiskSpeed(tuple(rates), reader.name, share)


def probe_direct(path: Path, block_bytes: int, shown: Path) -> None:
    """Raise MachineError where a few direct reads of a file, which has four pages or more, fail or do not come from a disk."""
    quarter = path.stat().st_size // 4 // PAGE_BYTES * PAGE_BYTES
    measure_disk([path], min(block_bytes, quarter), shown=shown, depths=(1,), seconds=0)


def random_blocks(paths: Sequence[Path], block_bytes: int, seed: int) -> list[tuple[int, int]]:
    """(file, offset) of whole blocks of all files, shuffled: all of them, or a sample where they are very many."""
    ends = list(itertools.accumulate(path.stat().st_size // block_bytes for path in paths))
    if ends[-1] == 0:
        raise MachineError("the file has no whole block to read", path=str(paths[0]), expected=f"{block_bytes} bytes")
    numbers = random.Random(seed).sample(range(ends[-1]), min(ends[-1], MAX_BLOCKS))
    files = [bisect.bisect_right(ends, number) for number in numbers]
    return [(f, (n - (ends[f - 1] if f else 0)) * block_bytes) for f, n in zip(files, numbers, strict=True)]


def open_direct(paths: Sequence[Path], depth: int, block_bytes: int, shown: Path) -> Reader:
    """A reader with direct I/O, one request to the disk for each block.  Raises MachineError where there is none."""
    reader = open_reader(paths, depth=depth, piece_bytes=block_bytes)
    if reader.name == "buffered":
        why = reader.why
        reader.close()
        raise MachineError(
            f"its file system has no direct reads ({why}): what would be measured is the page cache, not the disk",
            path=str(shown),
            hint="Name a folder on the disk itself, not on tmpfs or a network or overlay file system",
        )
    return reader


def _read_for(reader: Reader, order: Iterator[Read], addresses: Sequence[int], seconds: float) -> tuple[int, float]:
    """Keep a read in flight for each address until the time is up; (bytes, seconds) to the end of the last read."""
    begin = time.perf_counter()
    done = sum(_start(reader, next(order), address, slot) for slot, address in enumerate(addresses))
    for slot in itertools.cycle(range(len(addresses))):
        reader.wait(slot)
        if time.perf_counter() - begin >= seconds:
            break
        done += _start(reader, next(order), addresses[slot], slot)
    for other in set(range(len(addresses))) - {slot}:
        reader.wait(other)
    return done, time.perf_counter() - begin


def _start(reader: Reader, read: Read, address: int, tag: int) -> int:
    reader.submit([dataclasses.replace(read, address=address)], tag)
    return read.size_bytes


def disk_read_bytes() -> int | None:
    """Bytes that this process caused to be read from storage, by the kernel's count; None where it does not count."""
    if not _IO.is_file():
        return None
    match = re.search(r"^read_bytes: (\d+)$", _IO.read_text(), re.MULTILINE)
    return int(match[1]) if match else None


def check_counted(asked: int, before: int | None, after: int | None, shown: Path) -> float | None:
    """The share of `asked` bytes that the kernel counted between two readings; None where it does not count at all.

    Raises MachineError where the share is too small for a figure that is the disk's.
    """
    if before is None or after is None:
        return None
    share = (after - before) / asked
    if share < COUNTED_SHARE:
        raise MachineError(
            "the bytes did not come from a disk, but from memory (page cache, tmpfs, a hole of the file) or over a network: "
            "a figure of it would not be the disk's",
            path=str(shown),
            found=f"{100 * share:.1f} % of the bytes read from a disk, by the kernel's count",
            expected=f"at least {100 * COUNTED_SHARE:.0f} %",
            hint="Name a folder on the disk itself",
        )
    return share
