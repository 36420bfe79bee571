"""Experts in three tiers, VRAM, RAM and NVMe: where each call of a run finds its experts, and the bytes on each link.

VRAM is a cache of any policy.  Its misses come from RAM (moved host to device, h2d), or from NVMe through RAM (nvme, then
h2d).  The RAM tier is one of:

- `exclusive`: an expert is in VRAM or in RAM.  One that is loaded out of RAM is freed there, before those that leave VRAM for
  it are demoted into RAM (d2h) as its most recent; then the least recent leave RAM.  One that a call gives up although that
  call itself loaded it (a call larger than VRAM, a fixed set) is still clean in host memory: it moves nothing.
- `copy-on-read`: every read, from RAM or NVMe, makes an expert the most recent of RAM.  What leaves VRAM is dropped.
- `inclusive`: the same, and what leaves RAM leaves VRAM.  Hits in VRAM do not reach RAM, so they refresh nothing there.  The
  members of a fixed set stay in RAM, from where misses would push them out of the set.

RAM follows the model of a call: all missed experts are looked up in RAM as it stands before the call, and an expert of the
call leaves RAM for another of the call only when nothing else is left.  RAM of 0 is no tier, of any kind.  An expert that is
larger than RAM is never in it.

On a miss a call may compute on the CPU instead of loading: it reads the expert into RAM where it is not there, of whatever
kind RAM is, moves nothing to VRAM, and leaves VRAM as it is.  So the policy is a fixed set, or one that is chosen again
(repick), which still loads what it chooses.

Exclusive tiers with LRU in VRAM, demand loads, and calls cut to VRAM read from NVMe what one LRU of the sum of their slots
reads: all in RAM is older than all in VRAM, and both are in the order of last use.  This holds for experts of one size only;
with several sizes each tier leaves room of its own unused.

Other rules give other figures.  Replays that take one id after the other, so that an id may evict another of its own call, and
that demote into RAM before the id has left it, read 4 to 5 % more from NVMe on the public trace of the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bel.formats.trace_calls import LayerCalls
from bel.profiler.replay import Counted, foresight, global_stream
from bel.profiler.tier_caches import CPU, HOST_TIERS, TierCaches, Tiers
from bel.profiler.tiers import serve_calls
from bel.runtime.cache_rows import Ints
from bel.runtime.tier_step import (
    COLD,
    COUNTS,
    D2H,
    DISTINCT,
    FROM_NVME,
    FROM_RAM,
    H2D,
    LINKS,
    NVME,
    NVME_READS,
    ON_CPU,
    RAM_LOADS,
    UPLOADED,
)


@dataclass(frozen=True, slots=True)
class Served:
    """Where each call of a run found its experts, (C,) each, in the order of the run.

    `place` i64 is the place of the call's layer among the model's, `counted` bool as given, `tokens` the most counted rows of a
    layer.  i32 counts of distinct experts: `hits` in VRAM; `from_ram` and `from_nvme`, the misses, of which `cold` were read at
    the first use in the run and `on_cpu` computed on the CPU, a call of several rows once; `uploads` were loaded though no
    call missed them (repick).  Over the links went, uploads and all, `nvme_reads` experts from NVMe, and `ram_loads` into
    VRAM that RAM had.  i64 bytes of each link, `nvme_bytes`, `h2d_bytes` and `d2h_bytes`; None where the size of an expert
    is not known.
    """

    place: npt.NDArray[np.int64]
    counted: Counted
    tokens: int
    hits: npt.NDArray[np.int32]
    from_ram: npt.NDArray[np.int32]
    from_nvme: npt.NDArray[np.int32]
    cold: npt.NDArray[np.int32]
    on_cpu: npt.NDArray[np.int32]
    uploads: npt.NDArray[np.int32]
    nvme_reads: npt.NDArray[np.int32]
    ram_loads: npt.NDArray[np.int32]
    nvme_bytes: Ints | None
    h2d_bytes: Ints | None
    d2h_bytes: Ints | None


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the counted calls of all runs; see Served."""

    tokens: int
    hits: int
    from_ram: int
    from_nvme: int
    cold: int
    on_cpu: int
    uploads: int
    nvme_bytes: int | None
    h2d_bytes: int | None
    d2h_bytes: int | None

    @property
    def accesses(self) -> int:
        """Distinct experts of each call, summed."""
        return self.hits + self.from_ram + self.from_nvme

    def per_token(self, amount: int | None) -> float | None:
        """An amount of these by the tokens; None where there are none or it is not known."""
        return amount / self.tokens if self.tokens and amount is not None else None


def serve_tiers(layers: Sequence[LayerCalls], counted: Sequence[Counted], tiers: Tiers) -> Served:
    """Replay one run, all layers in the order of its calls, from empty tiers but for what is preloaded.

    `counted`: for each layer (C,), the calls that count.  Raises UsageError for on_miss CPU with a policy that lives by
    loading, and for a shared room where the size of an expert is not known.
    """
    return serve_from(TierCaches(layers, tiers), layers, counted, tiers)


def serve_from(caches: TierCaches, layers: Sequence[LayerCalls], counted: Sequence[Counted], tiers: Tiers) -> Served:
    """`serve_tiers` from caches that were made with these tiers; they are left as they are after the last call."""
    stream = global_stream(layers, counted)
    counts = np.zeros((COUNTS, len(stream.place)), np.int32)
    moved = np.zeros((LINKS, len(stream.place)), np.int64)
    is_own = tiers.vram.slots is not None
    serve_calls(
        caches.vram,
        caches.reals,
        caches.ram,
        caches.places,
        stream.ids,
        stream.id_start,
        stream.top_k,
        stream.base,
        np.ones_like(stream.ticks) if is_own else stream.ticks,
        foresight(tiers.policy, stream),
        HOST_TIERS[tiers.host_tier],
        tiers.on_miss == CPU,
        counts,
        moved,
    )
    amounts = moved if caches.has_bytes else [None] * 3
    return Served(
        place=stream.place,
        counted=stream.counted,
        tokens=max(int(x.rows_per_call[c].sum()) for x, c in zip(layers, counted, strict=True)),
        hits=counts[DISTINCT] - counts[FROM_RAM] - counts[FROM_NVME],
        from_ram=counts[FROM_RAM],
        from_nvme=counts[FROM_NVME],
        cold=counts[COLD],
        on_cpu=counts[ON_CPU],
        uploads=counts[UPLOADED],
        nvme_reads=counts[NVME_READS],
        ram_loads=counts[RAM_LOADS],
        nvme_bytes=amounts[NVME],
        h2d_bytes=amounts[H2D],
        d2h_bytes=amounts[D2H],
    )


def total(runs: Sequence[Served]) -> Totals:
    """The sums of several runs of one model."""

    def add(name: str) -> Any:
        columns = [getattr(run, name) for run in runs]
        if any(c is None for c in columns):
            return None
        return sum(int(c[run.counted].sum()) for c, run in zip(columns, runs, strict=True))

    names = ("hits", "from_ram", "from_nvme", "cold", "on_cpu", "uploads", "nvme_bytes", "h2d_bytes", "d2h_bytes")
    return Totals(tokens=sum(run.tokens for run in runs), **{name: add(name) for name in names})
