"""What a pool counts, prompt and decode apart, in an array that compiled code writes to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bel.runtime.cache_rows import Ints

CALLS, STAGE_CALLS, ACCESSES, MISSED, ABSENT = range(5)
UPLOADED_BYTES, STAGED_BYTES, MOVED_BYTES, WAIT_NS, IN_TIME, AHEAD_BYTES = range(5, 11)
N_COUNTS = 11
PROMPT, DECODE = 0, 1


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """One phase.  A call is one layer of one ubatch, an access one distinct expert of it.

    `missed` accesses found their expert in no slot; `absent` of them were computed on the CPU.  `stage_calls` went through the
    stage.  Bytes over the link to the home: `uploaded_bytes` into slots, `staged_bytes` to the stage; `moved_bytes` stayed
    within the home.  `wait_ns`: the home stood still for the CPU's experts.  `in_time` of the missed had been brought
    ahead of their use; `ahead_bytes` were, used or not.
    """

    calls: int
    stage_calls: int
    accesses: int
    missed: int
    absent: int
    uploaded_bytes: int
    staged_bytes: int
    moved_bytes: int
    wait_ns: int
    in_time: int
    ahead_bytes: int

    @property
    def to_home_bytes(self) -> int:
        """All that went over the link to the home."""
        return self.uploaded_bytes + self.staged_bytes + self.ahead_bytes

    @property
    def hits(self) -> int:
        """Accesses that found their expert in a slot."""
        return self.accesses - self.missed


class PoolCounters:
    """`rows` (2, N_COUNTS) i64, the phases; `phase` (1,) i64 says which one is counted now."""

    def __init__(self) -> None:
        self.rows: Ints = np.zeros((2, N_COUNTS), np.int64)
        self.phase: Ints = np.zeros(1, np.int64)

    def begin_decode(self) -> None:
        """Count what follows as decode."""
        self.phase[0] = DECODE

    def reset(self) -> None:
        """Nothing has been counted, and what follows is a prompt."""
        self.rows[:] = 0
        self.phase[0] = PROMPT

    @property
    def prompt(self) -> PoolCounts:
        """The prompt's counts so far."""
        return PoolCounts(*(int(x) for x in self.rows[PROMPT]))

    @property
    def decode(self) -> PoolCounts:
        """The counts of decoding so far."""
        return PoolCounts(*(int(x) for x in self.rows[DECODE]))
