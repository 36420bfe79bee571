"""Moving experts between the home, host memory and the disk, as a plan says (`tier_layers.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bel.runtime.pool_abi import PoolAbi
from bel.runtime.pool_counters import PoolCounters
from bel.runtime.pool_layers import LayerSlots
from bel.runtime.pool_tiers_hosts import Reading, TierHosts
from bel.runtime.slot_memory import SlotMemory
from bel.runtime.tier_counters import (
    CHECK_NS,
    COLD,
    D2H_BYTES,
    DEMOTED,
    FROM_NVME,
    FROM_RAM,
    H2D_BYTES,
    NVME_BYTES,
    READ_WAIT_NS,
    SPARED,
    TierCounters,
)
from bel.runtime.tier_layers import Demotion, Fetch, LayerTiers, TierPlan

Put = Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class HostTier:
    """What host memory holds beneath a pool: `counts` slots in each layer, `layers` with their owners, `counters` and the rest.

    `kind` is a key of HOST_TIERS.  `bounce_bytes` of host memory are the room for reads, by the `reader` named; `why` it is no
    better one.
    """

    kind: str
    counts: tuple[int, ...]
    layers: tuple[LayerTiers, ...]
    counters: TierCounters
    mover: TierMover
    bounce_bytes: int
    reader: str
    why: str


def make_tier(
    abi: PoolAbi,
    hosts: TierHosts,
    memory: SlotMemory,
    slots: Sequence[LayerSlots],
    kind: str,
    counters: PoolCounters,
) -> HostTier:
    """Tiers of empty slots: `slots` in the home, and those of `hosts`."""
    layers = tuple(LayerTiers(x, count, kind) for x, count in zip(slots, hosts.counts, strict=True))
    counts = TierCounters(counters.phase)
    mover = TierMover(abi, hosts, memory, layers, counts)
    return HostTier(kind, hosts.counts, layers, counts, mover, hosts.bounce_bytes, hosts.pager.name, hosts.pager.why)


class TierMover:
    """Moves experts of a pool.  Layer i of `memory` and `hosts` is `layers[i]`.

    What leaves the home is copied to the stage first, within the home: its slot is free at once, and the expert that takes it
    need not wait until the slot in host memory that *it* leaves has been filled.
    """

    def __init__(
        self, abi: PoolAbi, hosts: TierHosts, memory: SlotMemory, layers: Sequence[LayerTiers], counters: TierCounters
    ) -> None:
        self._abi, self._hosts, self._memory, self._layers, self._counters = abi, hosts, memory, layers, counters
        self._whole = abi.pointer(memory.whole)

    def serve(self, i: int, ids: npt.NDArray[np.uint16]) -> TierPlan:
        """Serve a call of layer i, `ids` (rows, top_k).  One of several rows finds its experts on the stage.

        Raises what the reads and checksums raise, and MachineError for every call after that.
        """
        with self._hosts.pager.guarded():
            plan = self._layers[i].serve(ids)
            self._count(i, plan)
            self._move(i, plan, is_staged=len(ids) > 1)
        return plan

    def preload(self, i: int, wanted: Sequence[int]) -> int:
        """Fill the slots of layer i before the first call, most wanted first.  Returns the bytes that went to the home."""
        in_vram, in_ram = self._layers[i].preload(wanted)
        slots = {fetch.expert: slot for slot, fetch in in_vram}
        sizes = []
        with self._hosts.pager.guarded():
            fetches = [fetch for _, fetch in in_vram]
            self._fetch(i, fetches, None, lambda expert: sizes.append(self._memory.upload(i, expert, slots[expert])))
            self._fetch(i, in_ram, None, lambda _: None)
            self._hosts.forget()
        return sum(sizes)

    def _move(self, i: int, plan: TierPlan, *, is_staged: bool) -> None:
        hosts, memory, slots = self._hosts, self._memory, dict(plan.loads)

        def put(expert: int) -> None:
            moved = memory.stage(i, expert) if is_staged else memory.upload(i, expert, slots[expert])
            self._counters.add(H2D_BYTES, moved)

        early = [fetch for fetch in plan.from_nvme if not fetch.is_late]
        late = [fetch for fetch in plan.from_nvme if fetch.is_late]
        first = self._start(i, early[: hosts.n_reads], 0)
        for expert, ram_slot in plan.from_ram:
            hosts.stand(i, expert, hosts.slot(i, ram_slot))
        to_stage = dict(plan.hits) if is_staged else {}
        to_stage |= {demotion.expert: demotion.vram_slot for demotion in plan.demoted}
        for expert, vram_slot in to_stage.items():
            memory.stage_slot(i, expert, vram_slot)
        for expert, _ in plan.from_ram:
            put(expert)
        memory.wait()
        self._demote(i, plan.demoted)
        self._fetch(i, early, first, put)
        self._fetch(i, late, None, put)
        if is_staged:
            for expert, vram_slot in plan.loads:
                memory.keep(i, expert, vram_slot)
            memory.wait()
        hosts.forget()

    def _demote(self, i: int, demoted: Sequence[Demotion]) -> None:
        """Copy experts from the stage to slots of host memory, of which nothing is needed any more."""
        lib = self._abi.lib
        for demotion in demoted:
            blob = self._hosts.slot(i, demotion.ram_slot)
            for place in self._memory.parts[i]:
                size = place.part.stride_bytes
                data = self._abi.pointer(blob + place.part.offset_bytes)
                lib.ggml_backend_tensor_get(self._whole, data, place.stage_bytes + demotion.expert * size, size)
                self._counters.add(D2H_BYTES, size)

    def _fetch(self, i: int, fetches: Sequence[Fetch], first: Reading | None, put: Put) -> None:
        """Read experts and `put` each, batch by batch; `first` is the first batch, where it is on its way already."""
        step = self._hosts.n_reads
        batches = [fetches[start : start + step] for start in range(0, len(fetches), step)]
        coming = first
        for number, batch in enumerate(batches):
            reading = coming or self._start(i, batch, number)
            coming = self._start(i, batches[number + 1], number + 1) if number + 1 < len(batches) else None
            assert reading is not None, "no batch is empty"
            self._finish(reading)
            for fetch in batch:
                put(fetch.expert)
            self._memory.wait()  # the batch after the next one is read to where this one stands

    def _start(self, i: int, batch: Sequence[Fetch], number: int) -> Reading | None:
        if not batch:
            return None
        hosts = self._hosts
        reads = []
        for at, fetch in enumerate(batch):
            room = hosts.bounce(number % 2 * hosts.n_reads + at)
            reads.append((fetch.expert, room if fetch.ram_slot is None else hosts.slot(i, fetch.ram_slot)))
        for expert, address in reads:
            hosts.stand(i, expert, address)
        return hosts.start(i, reads)

    def _finish(self, reading: Reading) -> None:
        began = time.perf_counter_ns()
        self._hosts.wait(reading)
        arrived = time.perf_counter_ns()
        self._hosts.check(reading)
        self._counters.add(READ_WAIT_NS, arrived - began)
        self._counters.add(CHECK_NS, time.perf_counter_ns() - arrived)

    def _count(self, i: int, plan: TierPlan) -> None:
        counts = {
            FROM_RAM: len(plan.from_ram),
            FROM_NVME: len(plan.from_nvme),
            COLD: plan.cold,
            DEMOTED: len(plan.demoted),
            SPARED: plan.spared,
            NVME_BYTES: len(plan.from_nvme) * self._hosts.layers[i].stride_bytes,
        }
        for what, count in counts.items():
            self._counters.add(what, count)
