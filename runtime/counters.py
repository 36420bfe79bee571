"""What a run counts: accesses, bytes and time, summed over layers and calls, prompt and decode apart."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class PhaseCounters:
    """One phase.  An access is one distinct expert of one call (a layer of a ubatch); times in nanoseconds.

    `missed` accesses had to be loaded, `prefetched_hits` of them were on their way already.  `uploads` are loads that no
    access asked for (repick), `wasted` prefetches that none used.  `wait_ns`: the computation stood still for reads.
    `check_ns`: checksums.  `callback_ns`: all that happened between the router's choice and the experts' products.
    """

    calls: int = 0
    accesses: int = 0
    missed: int = 0
    prefetched_hits: int = 0
    wasted: int = 0
    uploads: int = 0
    read_bytes: int = 0
    wait_ns: int = 0
    check_ns: int = 0
    callback_ns: int = 0

    @property
    def hits(self) -> int:
        """Accesses that found their expert resident."""
        return self.accesses - self.missed


@dataclass(slots=True)
class Counters:
    """Both phases; `now` is the one that is counted at the moment."""

    prompt: PhaseCounters = field(default_factory=PhaseCounters)
    decode: PhaseCounters = field(default_factory=PhaseCounters)
    now: PhaseCounters = field(init=False)

    def __post_init__(self) -> None:
        self.now = self.prompt
