"""A slow model of three tiers: the rules of `tier_links.py` with lists, a call at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from bel.profiler.tier_caches import CPU, LOAD, Room, Tiers
from bel.runtime.cache_state import CacheState, make_cache, preload, residents, step
from tier_runs import LISTS, Run

Cache = TypeVar("Cache")


class Vram(Protocol):
    """One VRAM cache of the slow model; items of the run."""

    def load(self, item: int) -> bool:
        """Preload."""

    def call(self, rows: list[list[int]], ticks: bool) -> tuple[list[int], list[int], list[int], list[int]]:
        """missed, victims, cut, uploads."""

    def has(self, item: int) -> bool: ...

    def expel(self, item: int) -> None: ...


class SlowList:
    """LRU, or least often used (counts outlive evictions or not), as a list of residents looked through for every victim."""

    def __init__(self, name: str, size: dict[int, int], capacity: int) -> None:
        self.name, self.size, self.capacity = name, size, capacity
        self.order: list[int] = []
        self.count = dict.fromkeys(size, 0)

    def has(self, item: int) -> bool:
        return item in self.order

    def expel(self, item: int) -> None:
        self.order.remove(item)
        if self.name == "lfu-forget":
            self.count[item] = 0

    def load(self, item: int) -> bool:
        if item in self.order or sum(self.size[x] for x in [*self.order, item]) > self.capacity:
            return False
        self.order.insert(0, item)
        return True

    def call(self, rows: list[list[int]], ticks: bool) -> tuple[list[int], list[int], list[int], list[int]]:  # noqa: ARG002
        used = [e for row in rows for e in row]
        missed = [e for e in dict.fromkeys(used) if e not in self.order]
        for e in used:
            self.order = [x for x in self.order if x != e] + [e]
        for e in set(used):
            self.count[e] += 1
        victims: list[int] = []
        cut: list[int] = []
        while sum(self.size[x] for x in self.order) > self.capacity:
            others = [x for x in self.order if x not in used]
            worst = min(others or self.order, key=lambda x: (0 if self.name == "lru" else self.count[x], self.order.index(x)))
            self.expel(worst)
            (victims if others else cut).append(worst)
        return missed, victims, cut, []


class SlowSet:
    """A fixed set."""

    def __init__(self, size: dict[int, int], capacity: int) -> None:
        self.size, self.capacity = size, capacity
        self.members: list[int] = []

    def has(self, item: int) -> bool:
        return item in self.members

    def expel(self, item: int) -> None:
        raise AssertionError(f"member {item} left RAM")

    def load(self, item: int) -> bool:
        if item in self.members or sum(self.size[x] for x in [*self.members, item]) > self.capacity:
            return False
        self.members.append(item)
        return True

    def call(self, rows: list[list[int]], ticks: bool) -> tuple[list[int], list[int], list[int], list[int]]:  # noqa: ARG002
        missed = [e for e in dict.fromkeys(e for row in rows for e in row) if e not in self.members]
        return missed, [], missed, []


class Stepped:
    """Any policy of the runtime, step by step (the policies have tests of their own); nothing may be expelled."""

    def __init__(self, state: CacheState, first: int) -> None:
        self.state, self.first = state, first

    def has(self, item: int) -> bool:
        return item - self.first in residents(self.state)

    def expel(self, item: int) -> None:
        raise AssertionError(f"item {item} left a RAM that is not inclusive")

    def load(self, item: int) -> bool:
        return bool(preload(self.state, [item - self.first]))

    def call(self, rows: list[list[int]], ticks: bool) -> tuple[list[int], list[int], list[int], list[int]]:
        s = step(self.state, np.array(rows, np.uint16) - np.uint16(self.first), ticks=ticks)
        missed, victims, cut, uploads = ([x + self.first for x in part] for part in (s.missed, s.victims, s.cut, s.uploads))
        return missed, victims, cut, uploads


def slow_vram(tiers: Tiers, place: int, items: list[int], sizes: list[int], capacity: int) -> Vram:
    by_item = dict(zip(items, sizes, strict=True))
    if tiers.policy.name == "static":
        return SlowSet(by_item, capacity)
    if tiers.policy.name in LISTS:
        return SlowList(tiers.policy.name, by_item, capacity)
    seed = tiers.seed + place
    state = make_cache(tiers.policy, np.array(sizes, np.int64), capacity, keep_whole=tiers.keep_whole, seed=seed)
    return Stepped(state, items[0])


@dataclass(slots=True)
class Ram:
    """One RAM of the slow model: items, the oldest first."""

    size: dict[int, int]
    capacity: int
    order: list[int]

    @property
    def used(self) -> int:
        return sum(self.size[x] for x in self.order)


class Slow:
    """The rules of `tier_links.py` with lists, a call at a time."""

    def __init__(self, run: Run, tiers: Tiers) -> None:
        self.run, self.tiers = run, tiers
        self.bytes = run.sizes
        self.vram = self._caches(
            tiers.vram, lambda items, sizes, room: slow_vram(tiers, self._place(items), items, sizes, room)
        )
        self.ram = self._caches(tiers.ram, lambda items, sizes, room: Ram(dict(zip(items, sizes, strict=True)), room, []))
        self.seen: set[int] = set()
        rows = [sum(len(r) for where, r in run.calls if where == place) for place in range(len(run.layers))]
        self.ticking = rows.index(max(rows))
        self._preload()

    def _place(self, items: list[int]) -> int:
        return 0 if len(items) == len(self.run.sizes) else self.run.bases.index(items[0])

    def _caches(self, room: Room, make: Callable[[list[int], list[int], int], Cache]) -> list[Cache]:
        """The cache of each item."""
        every = list(range(len(self.bytes)))
        if room.slots is None:
            one = make(every, self.bytes, room.shared_bytes or 0)
            return [one for _ in every]
        answer = []
        for base, info, slots in zip(self.run.bases, self.run.layers, room.slots, strict=True):
            one = make(list(range(base, base + info.n_expert)), [1] * info.n_expert, slots)
            answer += [one] * info.n_expert
        return answer

    def _preload(self) -> None:
        is_inclusive = self.tiers.host_tier == "inclusive"
        for base, order in zip(self.run.bases, self.tiers.preloaded, strict=False):
            for item in (base + e for e in order):
                ram = self.ram[item]
                has_ram = is_inclusive and ram.capacity > 0
                if (not has_ram or ram.used + ram.size[item] <= ram.capacity) and self.vram[item].load(item) and has_ram:
                    ram.order.insert(0, item)
        for base, order in zip(self.run.bases, self.tiers.ram_preloaded, strict=False):
            for item in (base + e for e in order):
                ram = self.ram[item]
                is_there = self.vram[item].has(item) or item in ram.order
                if not is_there and ram.used + ram.size[item] <= ram.capacity:
                    ram.order.insert(0, item)

    def call(self, place: int, rows: list[list[int]]) -> tuple[int, ...]:
        """hits, from_ram, from_nvme, cold, on_cpu, and the bytes on each link."""
        base = self.run.bases[place]
        items = [[base + e for e in row] for row in rows]
        own = list(dict.fromkeys(e for row in items for e in row))
        ticks = self.tiers.vram.slots is not None or place == self.ticking
        missed, victims, cut, uploads = self.vram[base].call(items, ticks)
        on_cpu = [e for e in missed if self.tiers.on_miss == CPU and not self.vram[e].has(e)]
        links: list[list[int]] = [[], [], []]
        if uploads:  # before the call, which may use what left for them
            self._bring(uploads, victims, [], own, links)
            victims = []
        found = self._bring(missed, victims + (cut if self.tiers.on_miss == LOAD else []), on_cpu, own, links)
        cold = [e for e in missed if e not in found and e not in self.seen]
        self.seen |= set(own)
        counts = (len(own) - len(missed), len(found), len(missed) - len(found), len(cold), len(on_cpu))
        return (*counts, *(sum(self.bytes[e] for e in link) for link in links))

    def _bring(self, items: list[int], gone: list[int], on_cpu: list[int], own: list[int], links: list[list[int]]) -> list[int]:
        """Those of the items that were in RAM.  Adds to the items moved on each link."""
        is_exclusive = self.tiers.host_tier == "exclusive"
        found = [e for e in items if e in self.ram[e].order]
        for e in items:
            if e in on_cpu or not is_exclusive:
                self._read(e)
            elif e in found:
                self.ram[e].order.remove(e)
        for e in gone if is_exclusive else []:
            if self.ram[e].size[e] <= self.ram[e].capacity:
                self.ram[e].order.append(e)
                links[2] += [] if e in items else [e]
                self._trim(self.ram[e], [])
        for e in items:
            self._trim(self.ram[e], own)
            is_out = self.ram[e].capacity > 0 and e not in self.ram[e].order
            if self.tiers.host_tier == "inclusive" and is_out and self.vram[e].has(e):
                self.vram[e].expel(e)
        links[0] += [e for e in items if e not in found]
        links[1] += [e for e in items if e not in on_cpu]
        return found

    def _read(self, item: int) -> None:
        ram = self.ram[item]
        if item in ram.order:
            ram.order.remove(item)
            ram.order.append(item)
        elif ram.size[item] <= ram.capacity:
            ram.order.append(item)

    def _trim(self, ram: Ram, own: list[int]) -> None:
        is_inclusive = self.tiers.host_tier == "inclusive"
        while ram.used > ram.capacity:
            may_go = [x for x in ram.order if not (is_inclusive and self.tiers.policy.name == "static" and self.vram[x].has(x))]
            gone = ([x for x in may_go if x not in own] or may_go)[0]
            ram.order.remove(gone)
            if is_inclusive and self.vram[gone].has(gone):
                self.vram[gone].expel(gone)

    def vram_items(self) -> set[int]:
        """All that is in VRAM."""
        return {item for item, cache in enumerate(self.vram) if cache.has(item)}

    def ram_items(self) -> set[int]:
        """All that is in RAM."""
        return {item for item, ram in enumerate(self.ram) if item in ram.order}
