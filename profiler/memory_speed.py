"""How fast memory is copied, with buffers that no CPU cache holds."""

from __future__ import annotations

import itertools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bel.formats.errors import MachineError
from bel.formats.units import MIB, format_bytes

MIN_RANGE_BYTES = 256 * MIB
PASSES = 5


def uncached_bytes(cache_bytes: int, available_bytes: int) -> int:
    """Bytes to walk over so that the walk finds nothing in the CPU's cache: twice the cache, or what memory allows.

    Raises MachineError where not even 256 MiB are a quarter of what is free.
    """
    most = available_bytes // 4
    if most < MIN_RANGE_BYTES:
        raise MachineError(
            "too little free memory to measure how fast it is",
            found=f"{format_bytes(available_bytes)} free",
            expected=f"at least {format_bytes(4 * MIN_RANGE_BYTES)}",
        )
    return min(most, max(MIN_RANGE_BYTES, 2 * cache_bytes))


def copy_bytes_per_s(range_bytes: int, n_threads: int, passes: int = PASSES) -> float:
    """Bytes copied per second (each counted once) by `n_threads` threads from one half of a range to the other: median pass."""
    size_bytes = range_bytes // 2
    source, target = np.ones(size_bytes, np.uint8), np.zeros(size_bytes, np.uint8)
    cuts = [size_bytes * i // n_threads for i in range(n_threads + 1)]
    seconds = []
    with ThreadPoolExecutor(n_threads) as pool:
        for _ in range(1 + passes):
            begin = time.perf_counter()
            jobs = [pool.submit(np.copyto, target[a:b], source[a:b]) for a, b in itertools.pairwise(cuts)]
            for job in jobs:
                job.result()
            seconds.append(time.perf_counter() - begin)
    # The first pass pays for the page faults of the buffers.
    return size_bytes / statistics.median(seconds[1:])
