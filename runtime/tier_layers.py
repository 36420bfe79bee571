"""A layer's experts in three tiers: a call goes in, and out comes what must be moved from where to where.

What is decided is decided by `cache_step.serve` and `tier_step.meet_call`, as in the simulator; here it gets slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bel.runtime.cache_rows import MISSED, OWN, RESIDENT
from bel.runtime.cache_state import make_cache
from bel.runtime.cache_step import serve
from bel.runtime.policies import LRU, Policy
from bel.runtime.pool_layers import LayerSlots
from bel.runtime.pool_step import SLOT_OF, slot_table
from bel.runtime.tier_owners import NO_SLOT, Owners, has_free, release, take
from bel.runtime.tier_step import (
    BYTES,
    COLD,
    COUNTS,
    D2H,
    EXCLUSIVE,
    INCLUSIVE,
    LINKS,
    PLACE_ROWS,
    RAM_ITEM,
    VRAM_ITEM,
    fits_in_ram,
    meet_call,
    preload_ram,
)

HOST_TIERS = {"exclusive": EXCLUSIVE, "inclusive": INCLUSIVE}


@dataclass(frozen=True, slots=True)
class Demotion:
    """An expert that leaves the home for host memory."""

    expert: int
    vram_slot: int
    ram_slot: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """An expert to be read: into a slot of host memory, where it stays, or past it.

    `is_late`: that slot holds an expert of the same call, which must have gone to the home before.
    """

    expert: int
    ram_slot: int | None = None
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class TierPlan:
    """What one call asks for.  The table of owners says already what is so afterwards.

    `distinct` experts of the call; `hits` (expert, slot) of them are in the home, `from_ram` (expert, slot) in host memory,
    `from_nvme` are to be read.  `demoted` leave the home for host memory.  `loads` (expert, slot): of those that were not in
    the home, the ones that stay there.  `slots` of a single row's experts, in its order.  By the rules `spared` experts more
    are demoted, which the same call pushes out of host memory again: nothing moves.  `cold` are read for the first time.
    """

    distinct: tuple[int, ...]
    hits: tuple[tuple[int, int], ...]
    from_ram: tuple[tuple[int, int], ...]
    from_nvme: tuple[Fetch, ...]
    demoted: tuple[Demotion, ...]
    loads: tuple[tuple[int, int], ...]
    slots: npt.NDArray[np.int32]
    spared: int
    cold: int

    @property
    def missed(self) -> int:
        """Experts of the call that were not in the home."""
        return len(self.from_ram) + len(self.from_nvme)


class LayerTiers:
    """One layer: its slots in the home with their policy, and `n_ram` slots of host memory.

    `host_tier` is a key of HOST_TIERS.
    """

    def __init__(self, slots: LayerSlots, n_ram: int, host_tier: str) -> None:
        n = slots.n_expert
        self.slots, self.n_ram, self.kind = slots, n_ram, HOST_TIERS[host_tier]
        self.ram = make_cache(Policy("lru", LRU), np.ones(n, np.int64), n_ram)
        self.owners = Owners(slots.table, slot_table(n, n_ram), n)
        self._places = np.zeros((PLACE_ROWS, n), np.int64)
        self._places[VRAM_ITEM] = self._places[RAM_ITEM] = np.arange(n)
        self._places[BYTES] = 1
        self._seen = np.zeros(n, np.bool_)
        self._calls = 0

    def check(self) -> None:
        """Raise AssertionError where an expert is not where it must be."""
        self.owners.check(self.slots.cache.ints, self.ram.ints, self.kind)

    def preload(self, wanted: Sequence[int]) -> tuple[list[tuple[int, Fetch]], list[Fetch]]:
        """Fill the slots before the first call, most wanted first: those of the home, then those of host memory.

        Returns (slot, where it is read to) for each of the home's, and what is read into host memory alone.
        """
        in_vram, in_ram = [], []
        r = self.ram.ints
        has_both = self.kind == INCLUSIVE and self.n_ram > 0
        for expert in wanted:
            if has_both and not fits_in_ram(r, expert):
                continue
            for _, slot in self.slots.preload([expert]):
                in_vram.append((slot, Fetch(expert, self._preload_ram(expert) if has_both else None)))
        for expert in wanted:
            if self.owners.vram[SLOT_OF, expert] == NO_SLOT and fits_in_ram(r, expert):
                in_ram.append(Fetch(expert, self._preload_ram(expert)))
        return in_vram, in_ram

    def _preload_ram(self, expert: int) -> int:
        preload_ram(self.ram.ints, expert)
        return take(self.owners.ram, expert)

    def serve(self, ids: npt.NDArray[np.uint16]) -> TierPlan:
        """Serve the call `ids` (rows, top_k), in the order of the router's ranks."""
        vram, reals, ram = self.slots.cache.ints, self.slots.cache.reals, self.ram.ints
        vram_before, ram_before = (table[SLOT_OF].tolist() for table in (self.owners.vram, self.owners.ram))
        counts, moved = np.zeros((COUNTS, 1), np.int32), np.zeros((LINKS, 1), np.int64)
        served = serve(vram, reals, ids, 0, len(ids), 0, True)
        meet_call(
            vram[None],
            reals[None],
            ram[None],
            self._places,
            self._seen,
            0,
            served,
            self.kind,
            False,
            self._calls,
            0,
            counts,
            moved,
        )
        self._calls += 1
        distinct, missed = vram[OWN, : served[0]].tolist(), vram[MISSED, : served[1]].tolist()
        from_ram = [(expert, ram_before[expert]) for expert in missed if ram_before[expert] != NO_SLOT]
        from_nvme, demoted = self._settle_ram(missed, vram_before, ram_before)
        loads = self._settle_vram(missed, vram_before)
        return TierPlan(
            distinct=tuple(distinct),
            hits=tuple((expert, vram_before[expert]) for expert in distinct if vram_before[expert] != NO_SLOT),
            from_ram=tuple(from_ram),
            from_nvme=tuple(from_nvme),
            demoted=tuple(demoted),
            loads=tuple(loads),
            slots=self.owners.vram[SLOT_OF, ids[0]].astype(np.int32),
            spared=int(moved[D2H, 0]) - len(demoted),
            cold=int(counts[COLD, 0]),
        )

    def _settle_ram(
        self, missed: Sequence[int], vram_before: Sequence[int], ram_before: Sequence[int]
    ) -> tuple[list[Fetch], list[Demotion]]:
        """Give host memory's slots to what is there after a call.  The last to be given are those that the call loads from."""
        table, is_in = self.owners.ram, self.ram.ints[RESIDENT]
        gone = [x for x in range(self.slots.n_expert) if ram_before[x] != NO_SLOT and not is_in[x]]
        come = [x for x in range(self.slots.n_expert) if ram_before[x] == NO_SLOT and is_in[x]]
        used = set(missed)
        read = [expert for expert in missed if ram_before[expert] == NO_SLOT]
        for expert in gone:
            if expert not in used:
                release(table, expert)
        early = {x: take(table, x) for x in read if is_in[x] and has_free(table)}
        for expert in gone:
            if expert in used:
                release(table, expert)
        late = {x: take(table, x) for x in read if is_in[x] and x not in early}
        fetches = [Fetch(x, early.get(x, late.get(x)), x in late) for x in read]
        demoted = [Demotion(x, vram_before[x], take(table, x)) for x in come if x not in used]
        return fetches, demoted

    def _settle_vram(self, missed: Sequence[int], vram_before: Sequence[int]) -> list[tuple[int, int]]:
        table, is_in = self.owners.vram, self.slots.cache.ints[RESIDENT]
        for expert in range(self.slots.n_expert):
            if vram_before[expert] != NO_SLOT and not is_in[expert]:
                release(table, expert)
        return [(expert, take(table, expert)) for expert in missed if is_in[expert]]
