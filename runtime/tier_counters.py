"""What a pool with a host tier counts besides, prompt and decode apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bel.runtime.cache_rows import Ints
from bel.runtime.pool_counters import DECODE, PROMPT

FROM_RAM, FROM_NVME, COLD, DEMOTED, SPARED, NVME_BYTES, H2D_BYTES, D2H_BYTES, READ_WAIT_NS, CHECK_NS = range(10)
_N_COUNTS = 10


@dataclass(frozen=True, slots=True)
class TierCounts:
    """One phase.  Of the accesses that found their expert in no slot of the home, `from_ram` found it in host memory and
    `from_nvme` on the disk, `cold` of them for the first time.

    `demoted` experts went from the home to host memory.  `spared` more would have by the rules, but the same call pushed them
    out of there again: they were dropped.  Bytes of each link: `nvme_bytes` are whole blobs, the others are weights alone.
    `read_wait_ns`: the call stood still for reads; `check_ns`: for the checksums of what was read for the first time.
    """

    from_ram: int
    from_nvme: int
    cold: int
    demoted: int
    spared: int
    nvme_bytes: int
    h2d_bytes: int
    d2h_bytes: int
    read_wait_ns: int
    check_ns: int


class TierCounters:
    """`rows` (2, counts) i64, the phases.  `phase` (1,) i64 is that of the pool's other counters."""

    def __init__(self, phase: Ints) -> None:
        self.rows: Ints = np.zeros((2, _N_COUNTS), np.int64)
        self._phase = phase

    def add(self, what: int, count: int) -> None:
        """Count in the phase that is counted now."""
        self.rows[self._phase[0], what] += count

    def reset(self) -> None:
        """Nothing has been counted."""
        self.rows[:] = 0

    @property
    def prompt(self) -> TierCounts:
        """The prompt's counts so far."""
        return TierCounts(*(int(x) for x in self.rows[PROMPT]))

    @property
    def decode(self) -> TierCounts:
        """The counts of decoding so far."""
        return TierCounts(*(int(x) for x in self.rows[DECODE]))
