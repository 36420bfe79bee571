"""The three tiers before the first call: how large VRAM and RAM are, what is preloaded, and the arrays for `tiers.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bel.formats.errors import UsageError
from bel.formats.trace_calls import LayerCalls
from bel.formats.trace_header import TraceLayer
from bel.formats.units import format_bytes
from bel.profiler.replay import first_items
from bel.runtime.cache_rows import CAPACITY, CONFIG, INT_ROWS, REAL_ROWS, RESIDENT, Floats, Ints
from bel.runtime.cache_state import CacheState, make_cache, preload
from bel.runtime.policies import LRU, REPICK, STATIC, Policy
from bel.runtime.tier_step import (
    BYTES,
    COPY_ON_READ,
    EXCLUSIVE,
    INCLUSIVE,
    PLACE_ROWS,
    RAM_ITEM,
    RAM_STATE,
    VRAM_ITEM,
    VRAM_STATE,
    fits_in_ram,
    preload_ram,
)

HOST_TIERS = {"exclusive": EXCLUSIVE, "inclusive": INCLUSIVE, "copy-on-read": COPY_ON_READ}
LOAD, CPU = "load", "cpu"
_OLDEST_LEAVES = Policy("lru", LRU)
Orders = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Room:
    """The capacity of a tier: `slots` of each layer, or `shared_bytes` for all layers together."""

    slots: tuple[int, ...] | None = None
    shared_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Tiers:
    """What is replayed.  `host_tier` is a key of HOST_TIERS, `on_miss` LOAD or CPU.

    `preloaded` and `ram_preloaded`: the experts of each layer, most wanted first, that are loaded before the first call as far
    as there is room, layer by layer in a shared room; these loads are not counted.  An expert is preloaded into one tier, but
    for an inclusive RAM, which has all that VRAM has.  `keep_whole` as in `make_cache`; `seed` is that of the first cache, and
    those of further layers count on.
    """

    policy: Policy
    vram: Room
    ram: Room
    host_tier: str = "exclusive"
    on_miss: str = LOAD
    preloaded: Orders = ()
    ram_preloaded: Orders = ()
    keep_whole: bool = False
    seed: int = 1


class TierCaches:
    """The tiers of a model with these layers, preloaded.

    `vram` (caches, INT_ROWS, columns) i64 with `reals` (caches, REAL_ROWS, columns) f64, `ram` like `vram`: the arrays of
    CacheState, a cache for each layer or one for all.  `places` (5, items of the run) i64 says where an item may be.
    """

    def __init__(self, layers: Sequence[LayerCalls], tiers: Tiers) -> None:
        _check(layers, tiers)
        self._first = first_items(layers)
        self._layer_of = np.repeat(np.arange(len(layers)), [x.info.n_expert for x in layers])
        known = [x.info.expert_bytes or 0 for x in layers]
        self.has_bytes = all(known)
        self.places = np.zeros((PLACE_ROWS, len(self._layer_of)), np.int64)
        self.places[BYTES] = np.array(known)[self._layer_of] if self.has_bytes else 1
        self.vram, self.reals = self._make(tiers.vram, tiers.policy, tiers, (VRAM_STATE, VRAM_ITEM))
        self.ram, _ = self._make(tiers.ram, _OLDEST_LEAVES, tiers, (RAM_STATE, RAM_ITEM))
        self._preload(tiers)

    def vram_items(self) -> set[int]:
        """Items of the run that are in VRAM."""
        return set(np.flatnonzero(self.vram[self.places[VRAM_STATE], RESIDENT, self.places[VRAM_ITEM]]).tolist())

    def ram_items(self) -> set[int]:
        """Items of the run that are in RAM."""
        return set(np.flatnonzero(self.ram[self.places[RAM_STATE], RESIDENT, self.places[RAM_ITEM]]).tolist())

    def _make(self, room: Room, policy: Policy, tiers: Tiers, rows: tuple[int, int]) -> tuple[Ints, Floats]:
        """The caches of one tier; and where in them each item is, in the `rows` of `places`."""
        items = np.arange(len(self._layer_of))
        if room.slots is None:
            made = [(self.places[BYTES], room.shared_bytes or 0)]
            self.places[rows[0]], self.places[rows[1]] = 0, items
        else:
            many = np.bincount(self._layer_of, minlength=len(self._first))
            made = [(np.ones(n, np.int64), slots) for n, slots in zip(many, room.slots, strict=True)]
            self.places[rows[0]], self.places[rows[1]] = self._layer_of, items - np.array(self._first)[self._layer_of]
        states = [
            make_cache(policy, s, c, keep_whole=tiers.keep_whole, seed=tiers.seed + place) for place, (s, c) in enumerate(made)
        ]
        columns = max(s.ints.shape[1] for s in states)
        ints, reals = np.zeros((len(states), INT_ROWS, columns), np.int64), np.zeros((len(states), REAL_ROWS, columns))
        for place, state in enumerate(states):
            ints[place, :, : state.ints.shape[1]], reals[place, :, : state.reals.shape[1]] = state.ints, state.reals
        return ints, reals

    def _preload(self, tiers: Tiers) -> None:
        is_inclusive = tiers.host_tier == "inclusive"
        is_pinned = is_inclusive and tiers.policy.kind in (STATIC, REPICK)
        for item in self._items(tiers.preloaded):
            r, at = self._ram_of(item)
            has_ram = is_inclusive and r[CONFIG, CAPACITY] > 0
            if has_ram and not fits_in_ram(r, at):
                continue
            place = self.places[VRAM_STATE, item]
            taken = preload(CacheState(self.vram[place], self.reals[place]), [int(self.places[VRAM_ITEM, item])])
            if taken and has_ram:
                preload_ram(r, at, stays=is_pinned)
        in_vram = self.vram_items()
        for item in self._items(tiers.ram_preloaded):
            r, at = self._ram_of(item)
            if item not in in_vram and fits_in_ram(r, at):
                preload_ram(r, at)

    def _ram_of(self, item: int) -> tuple[Ints, int]:
        return self.ram[self.places[RAM_STATE, item]], int(self.places[RAM_ITEM, item])

    def _items(self, orders: Orders) -> Iterator[int]:
        if orders:
            for first, order in zip(self._first, orders, strict=True):
                yield from (first + expert for expert in order)


def _check(layers: Sequence[LayerCalls], tiers: Tiers) -> None:
    if tiers.on_miss == CPU and tiers.policy.kind not in (STATIC, REPICK):
        cause = (
            f"with misses computed on the CPU nothing is loaded, so the policy {tiers.policy.name} would have an empty cache"
        )
        raise UsageError(cause, hint="Use a static set or repick:N, or let misses load")
    for room in (tiers.vram, tiers.ram):
        if room.slots is None and any(x.info.expert_bytes is None for x in layers):
            raise UsageError("a tier in bytes needs the bytes of an expert, and the trace does not have them", hint="Use slots")


def check_inclusive(vram: Room, ram: Room, layers: Sequence[TraceLayer]) -> None:
    """Raises UsageError where an inclusive RAM cannot have all that VRAM may have: VRAM would be served from nowhere."""
    if vram.slots is not None and ram.slots is not None:
        fits = all(r >= v for v, r in zip(vram.slots, ram.slots, strict=True))
        sizes = f"RAM has {min(ram.slots)} slots in a layer, and VRAM {max(vram.slots)}"
    elif any(x.expert_bytes is None for x in layers):
        return  # a tier in bytes is refused without them
    else:
        in_vram, in_ram = (_room_bytes(room, layers) for room in (vram, ram))
        fits, sizes = in_ram >= in_vram, f"RAM has {format_bytes(in_ram)}, and VRAM {format_bytes(in_vram)}"
    if not fits:
        hint = "Give RAM as much as VRAM or more, or use --host-tier exclusive"
        raise UsageError(f"an inclusive RAM holds all that VRAM holds, and is smaller here: {sizes}", hint=hint)


def _room_bytes(room: Room, layers: Sequence[TraceLayer]) -> int:
    if room.slots is None:
        return room.shared_bytes or 0
    return sum(slots * (x.expert_bytes or 0) for slots, x in zip(room.slots, layers, strict=True))
