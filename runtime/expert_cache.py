"""The slots of a running model: which experts are resident, by the policy, and the pages that they stand in."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bel.formats.errors import UsageError
from bel.formats.experts_file import LayerLayout
from bel.runtime import guess_gate
from bel.runtime.arena import Arena
from bel.runtime.cache_rows import NOWHERE
from bel.runtime.cache_state import CacheState, Step, make_cache, preload, residents, step
from bel.runtime.counters import Counters
from bel.runtime.pager import FIRST, REST, Load, Pager
from bel.runtime.policies import Policy

PREFETCH_SHARE = 0.75
"""The next layer is read ahead where a call is expected to use at least this share of its experts."""
GUESSED_READS = 2
"""Experts of the next layer that one row's guess has read ahead at most: what arrives while a layer computes."""
MOST_IN_VAIN = 1
"""Reads ahead in vain for each that is used: the disk is what a token waits for."""


@dataclass(frozen=True, slots=True)
class _Coming:
    """Experts of a layer that are being read, by id: each half under a tag of the pager (`rest` None: all comes at once)."""

    place: int
    first: int
    rest: int | None
    loads: dict[int, Load]


class ExpertCache:
    """Slots for the experts of a model's layers, `slots[place]` for the layer at `place` in the order of the bundle.

    A layer's slots hold what its policy keeps between calls; while a call is served its missing experts stand beside them.
    `prefetch_bytes` is what may be read ahead for the next layer.
    """

    def __init__(self, pager: Pager, arena: Arena, policy: Policy, slots: Sequence[int], *, prefetch_bytes: int = 0) -> None:
        self._pager, self._arena, self._policy = pager, arena, policy
        self._layers: tuple[LayerLayout, ...] = pager.layers
        self._states: list[CacheState] = []
        for layer, count in zip(self._layers, slots, strict=True):
            if not 0 <= count <= layer.n_expert:
                raise UsageError(f"layer {layer.layer} has {layer.n_expert} experts, not room for {count} slots")
            self._states.append(make_cache(policy, np.ones(layer.n_expert, np.int64), count))
        self._following = _following(self._layers)
        self.slots = tuple(slots)
        self.prefetch_bytes = prefetch_bytes
        self.counters = Counters()
        self._spare: dict[int, dict[int, None]] = {}
        """Addresses of pages that nobody needs, by their size: of evicted blobs, until the next layer has taken its part."""
        self._cut: list[tuple[int, int]] = []
        self._ahead: _Coming | None = None
        self._rest: list[_Coming] = []
        self._gate, self._is_guess = guess_gate.make_gate(), False

    def preload(self, wanted: Sequence[Sequence[int]]) -> int:
        """Fill slots before the first call, `wanted[place]` experts of each layer, most wanted first.  Returns the bytes."""
        total = 0
        with self._guarded():
            for place, experts in enumerate(wanted):
                chosen = preload(self._states[place], experts)
                coming = self._start(place, {e: Load(place, e, self._arena.address(place, e)) for e in chosen})
                if coming is not None:
                    self._finish_first(coming)
                    self._finish_rest(coming)
                total += len(chosen) * self._layers[place].stride_bytes
        self.counters = Counters()  # what was read before the first token belongs to none
        return total

    def serve(
        self,
        place: int,
        ids: npt.NDArray[np.uint16],
        *,
        whole: bool = True,
        likely: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        """Make the experts of a call resident: `ids` (rows, top_k) of the layer at `place`, in slot order.

        Unless `whole`, what only the last product of the experts reads may still be on its way: `finish` waits for it.
        `likely` gives experts that the layer at a place will probably want next, likeliest first: the first that are missing
        are read ahead.  Raises what the reads and checksums raise, and MachineError for every call after that.
        """
        began = time.perf_counter_ns()
        with self._guarded():
            self._finish_rests()  # of a graph that ended early: else what is on its way would come into pages that moved
            self._release_cut()
            self._drop_spare(but_bytes=self._layers[place].stride_bytes)
            done = step(self._states[place], ids)
            self._load(place, done)
            if whole:
                self._finish_rests()
            following = self._following[place]
            # Pages of other sizes are of no use to the next layer, and would come on top of what it needs.
            self._drop_spare(but_bytes=self._layers[following].stride_bytes, keep=self._kept_pages(following, len(ids)))
            if following > place:
                self._ahead = self._read_ahead(following, len(ids), likely)
        self.counters.now.callback_ns += time.perf_counter_ns() - began

    def _load(self, place: int, done: Step) -> None:
        """Load what a step of the policy asks for, into the pages of its victims; and count it."""
        counters, ahead = self.counters.now, self._take_ahead(place)
        for expert in done.victims:
            self._free(place, expert)
        wanted = [*done.uploads, *(expert for expert in done.missed if expert not in ahead)]
        coming = self._start(place, {expert: self._room(place, expert) for expert in wanted})
        self._waste(place, ahead, done)
        self._cut = [(place, expert) for expert in done.cut]
        if coming is not None:
            self._finish_first(coming)
            self._rest.append(coming)
        counters.calls += 1
        counters.accesses += done.distinct
        counters.missed += len(done.missed)
        counters.uploads += len(done.uploads)
        counters.prefetched_hits += sum(expert in ahead for expert in done.missed)

    def finish(self) -> None:
        """Wait for what the last `serve` left on its way."""
        if self._rest:
            began = time.perf_counter_ns()
            with self._guarded():
                self._finish_rests()
            self.counters.now.callback_ns += time.perf_counter_ns() - began

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """See `Pager.guarded`; nor is anything here still expected."""
        try:
            with self._pager.guarded():
                yield
        except Exception:
            self._rest, self._ahead = [], None
            raise

    def _finish_rests(self) -> None:
        while self._rest:
            self._finish_rest(self._rest.pop())

    def resident(self, place: int) -> list[int]:
        """The experts in the slots of a layer."""
        return residents(self._states[place])

    def settle(self) -> None:
        """At the end of a graph: give up what was only needed for it.  A read-ahead for a layer that did not come is waste."""
        began = time.perf_counter_ns()
        with self._guarded():
            self._finish_rests()
            self._release_cut()
            if self._ahead is not None:
                self._take_ahead(NOWHERE)
            first = self._following[-1]
            self._drop_spare(but_bytes=self._layers[first].stride_bytes, keep=self._kept_pages(first, 1))
        self.counters.now.callback_ns += time.perf_counter_ns() - began

    def _start(self, place: int, loads: dict[int, Load]) -> _Coming | None:
        """Begin to read blobs; first halves of all of them come before any rest."""
        if not loads:
            return None
        several = list(loads.values())
        first = self._pager.start(several, FIRST)
        rest = self._pager.start(several, REST) if self._pager.has_rest(place) else None
        self.counters.now.read_bytes += len(loads) * self._layers[place].stride_bytes
        return _Coming(place, first, rest, loads)

    def _finish_first(self, coming: _Coming) -> None:
        self._wait(coming.first)
        self._check(coming, FIRST)

    def _finish_rest(self, coming: _Coming) -> None:
        if coming.rest is not None:
            self._wait(coming.rest)
            self._check(coming, REST)

    def _wait(self, tag: int) -> None:
        began = time.perf_counter_ns()
        self._pager.finish(tag)
        self.counters.now.wait_ns += time.perf_counter_ns() - began

    def _check(self, coming: _Coming, half: int) -> None:
        began = time.perf_counter_ns()
        self._pager.check(coming.loads.values(), half)
        self.counters.now.check_ns += time.perf_counter_ns() - began

    def _room(self, place: int, expert: int) -> Load:
        """An address for an expert, with pages that are there already if some are spare."""
        address, size = self._arena.address(place, expert), self._layers[place].stride_bytes
        spare = self._spare.get(size)
        if spare and address in spare:  # else these pages would be taken from under the expert by the next one that needs some
            del spare[address]
        elif spare:
            self._arena.move(spare.popitem()[0], address, size)
        return Load(place, expert, address)

    def _free(self, place: int, expert: int) -> None:
        size = self._layers[place].stride_bytes
        self._spare.setdefault(size, {})[self._arena.address(place, expert)] = None

    def _release_cut(self) -> None:
        """The experts that the last call used and that have no slot are free: it has been computed."""
        for place, expert in self._cut:
            self._free(place, expert)
        self._cut = []

    def _kept_pages(self, following: int, rows: int) -> int | None:
        """Of how many blobs pages are kept for the layer that comes next: all behind a prompt's call (None)."""
        layer = self._layers[following]
        return None if rows > 1 else min(GUESSED_READS, self.prefetch_bytes // layer.stride_bytes)

    def _drop_spare(self, *, but_bytes: int = 0, keep: int | None = None) -> None:
        """Give pages that nobody needs back to the machine, but those of blobs of `but_bytes`: of `keep` of them, or all."""
        for size, addresses in self._spare.items():
            left = 0 if size != but_bytes else len(addresses) if keep is None else keep
            while len(addresses) > left:
                self._arena.drop(addresses.popitem()[0], size)

    def _take_ahead(self, place: int) -> dict[int, Load]:
        """What was read ahead for this layer, arrived, by expert; no longer ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return {}
        self._finish_first(ahead)
        self._finish_rest(ahead)
        if ahead.place == place:
            return ahead.loads
        for load in ahead.loads.values():  # the graph skipped the layer
            self._free(load.place, load.expert)
        self.counters.now.wasted += len(ahead.loads)
        return {}

    def _waste(self, place: int, ahead: dict[int, Load], done: Step) -> None:
        unused = ahead.keys() - set(done.missed) - set(done.uploads)
        for expert in unused:
            self._free(place, expert)
        self.counters.now.wasted += len(unused)
        if self._is_guess and ahead:
            guess_gate.count(self._gate, len(ahead) - len(unused), len(unused))
        self._is_guess = False

    def _read_ahead(self, place: int, rows: int, likely: Callable[[int], Sequence[int]] | None) -> _Coming | None:
        """Begin to read experts of the next layer that are not resident: all where the call will use most of them, else the
        likely ones of a single row."""
        layer = self._layers[place]
        room = self.prefetch_bytes // layer.stride_bytes
        used = 1 - (1 - (layer.n_used or 0) / layer.n_expert) ** rows
        wanted: Sequence[int] = ()
        if used >= PREFETCH_SHARE:
            wanted = range(layer.n_expert)
        elif rows == 1 and likely is not None and room and guess_gate.is_open(self._gate, MOST_IN_VAIN):
            wanted, room = likely(place), min(room, GUESSED_READS)
            self._is_guess = True
        there = set(self.resident(place)) if wanted else set()
        chosen = [expert for expert in wanted if expert not in there][:room]
        return self._start(place, {expert: self._room(place, expert) for expert in chosen})


def _following(layers: Sequence[LayerLayout]) -> list[int]:
    """For each layer the one that is called next: the first one of the next graph behind the last.  No MTP block is called."""
    n = len(layers)
    return [next((p % n for p in range(i + 1, i + n) if not layers[p % n].is_mtp), i) for i in range(n)]
