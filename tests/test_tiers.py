"""Three tiers: equal to a slow model of lists for every host tier, and what must hold whatever the routes are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.errors import UsageError
from bel.formats.trace import DECODE
from bel.formats.trace_calls import LayerCalls, Trace, read_trace
from bel.formats.trace_header import TraceLayer
from bel.formats.units import MIB
from bel.profiler.belady import belady_hits
from bel.profiler.curves import lru_curves
from bel.profiler.replay import BELADY_POLICY
from bel.profiler.tier_caches import CPU, HOST_TIERS, LOAD, Orders, Room, TierCaches, Tiers
from bel.profiler.tier_links import Served, Totals, serve_from, serve_tiers, total
from bel.runtime.cache_state import CacheState, make_cache, preload, residents, step
from bel.runtime.policies import parse_policy
from public_trace import READ_BYTES, import_public_trace
from routes import layer_calls, some_row

Call = tuple[int, list[list[int]]]  # place of the layer, rows of ids
Cache = TypeVar("Cache")
LISTS = ("lru", "lfu-ghost", "lfu-forget")
OTHERS = ("lfu-decay:0.5", "lfuda", "slru", "arc", "s3fifo", "repick:3", "random")


@dataclass(frozen=True, slots=True)
class Run:
    """A run that hypothesis made."""

    layers: tuple[TraceLayer, ...]
    calls: tuple[Call, ...]

    @property
    def bases(self) -> list[int]:
        """The item of expert 0 of each layer."""
        return [sum(x.n_expert for x in self.layers[:place]) for place in range(len(self.layers))]

    @property
    def sizes(self) -> list[int]:
        """The bytes of each item."""
        return [x.expert_bytes or 0 for x in self.layers for _ in range(x.n_expert)]

    def recorded(self, many: int | None = None) -> list[LayerCalls]:
        """The first `many` calls as a trace has them."""
        calls = list(enumerate(self.calls[:many]))
        answer = []
        for place, info in enumerate(self.layers):
            own = [(number, rows) for number, (where, rows) in calls if where == place]
            bare = layer_calls([(DECODE, rows) for _, rows in own], info.n_expert, info.top_k)
            answer.append(replace(bare, info=info, order=np.array([number for number, _ in own], np.int64)))
        return answer


@st.composite
def runs(draw: st.DrawFn, sizes: Sequence[int] = (1, 2, 3)) -> Run:
    layers = []
    for place in range(draw(st.integers(1, 3))):
        n_expert = draw(st.integers(2, 7))
        layers.append(TraceLayer(place, n_expert, draw(st.integers(1, min(3, n_expert))), draw(st.sampled_from(sizes))))
    many = draw(st.integers(1, 25))
    some = st.one_of(*(calls_of(place, x.n_expert, x.top_k) for place, x in enumerate(layers)))
    return Run(tuple(layers), tuple(draw(st.lists(some, min_size=many, max_size=many))))


@cache
def calls_of(place: int, n_expert: int, top_k: int) -> st.SearchStrategy[Call]:
    """Calls of one layer; made once, since to make a strategy takes longer than to draw from it."""
    row = some_row(n_expert, top_k)
    one, many = st.lists(row, min_size=1, max_size=1), st.lists(row, min_size=1, max_size=4)
    return st.tuples(st.just(place), st.one_of(one, one, many))


def rooms(run: Run, *, is_shared: bool | None = None) -> st.SearchStrategy[Room]:
    per_layer = st.tuples(*(st.integers(0, x.n_expert) for x in run.layers)).map(lambda s: Room(slots=s))
    shared = st.integers(0, sum(run.sizes) + 1).map(lambda b: Room(shared_bytes=b))
    return st.one_of(*([per_layer] if not is_shared else []), *([shared] if is_shared is not False else []))


def orders(run: Run) -> st.SearchStrategy[Orders]:
    return st.tuples(*(st.lists(st.integers(0, x.n_expert - 1), unique=True).map(tuple) for x in run.layers))


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


def all_counted(layers: Sequence[LayerCalls]) -> list[np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    return [np.ones(len(x.phase), np.bool_) for x in layers]


def served(run: Run, tiers: Tiers, many: int | None = None) -> Served:
    layers = run.recorded(many)
    return serve_tiers(layers, all_counted(layers), tiers)


def columns(answer: Served) -> list[tuple[int, ...]]:
    links = [answer.nvme_bytes, answer.h2d_bytes, answer.d2h_bytes]
    counts = [answer.hits, answer.from_ram, answer.from_nvme, answer.cold, answer.on_cpu]
    return [tuple(int(x) for x in row) for row in zip(*counts, *(x for x in links if x is not None), strict=True)]


def tiers_for(run: Run, policies: Sequence[str], host: str, on_miss: str = LOAD) -> st.SearchStrategy[Tiers]:
    return st.builds(
        Tiers,
        policy=st.sampled_from([parse_policy(name) for name in policies]),
        vram=rooms(run),
        ram=rooms(run),
        host_tier=st.just(host),
        on_miss=st.just(on_miss),
        preloaded=st.one_of(st.just(()), orders(run)),
        ram_preloaded=st.one_of(st.just(()), orders(run)),
    )


def check_against_lists(run: Run, tiers: Tiers) -> None:
    slow, answer = Slow(run, tiers), served(run, tiers)
    assert columns(answer) == [slow.call(*call) for call in run.calls]
    loaded = answer.from_ram + answer.from_nvme - answer.on_cpu + answer.uploads
    assert tiers.on_miss == CPU or (answer.nvme_reads + answer.ram_loads == loaded).all()
    if tiers.vram.slots is not None or not answer.uploads.any():  # else the uploads are of other layers too
        size = np.array([run.layers[place].expert_bytes for place in answer.place])
        assert (answer.nvme_reads * size == answer.nvme_bytes).all()
        assert (loaded * size == answer.h2d_bytes).all()
    caches = TierCaches(run.recorded(), tiers)
    serve_from(caches, run.recorded(), all_counted(run.recorded()), tiers)
    assert (caches.vram_items(), caches.ram_items()) == (slow.vram_items(), slow.ram_items())


@settings(max_examples=80)
@given(st.data())
@pytest.mark.parametrize("host", HOST_TIERS)
def test_loads_are_those_of_lists(host: str, data: st.DataObject) -> None:
    run = data.draw(runs())
    check_against_lists(run, data.draw(tiers_for(run, (*LISTS, "static"), host)))


@settings(max_examples=100)
@given(st.data(), st.sampled_from(["exclusive", "copy-on-read"]))
def test_any_policy_above_ram_is_that_of_lists(data: st.DataObject, host: str) -> None:
    run = data.draw(runs())
    tiers = data.draw(tiers_for(run, OTHERS, host))
    check_against_lists(run, replace(tiers, keep_whole=data.draw(st.booleans())))


@settings(max_examples=80)
@given(st.data(), st.sampled_from(list(HOST_TIERS)))
def test_misses_on_the_cpu_are_those_of_lists(data: st.DataObject, host: str) -> None:
    run = data.draw(runs())
    policies = ("static",) if host == "inclusive" else ("static", "repick:3")
    check_against_lists(run, data.draw(tiers_for(run, policies, host, CPU)))


@settings(max_examples=50)
@given(st.data())
@pytest.mark.parametrize("host", ["exclusive", "inclusive"])
def test_where_an_expert_may_be(host: str, data: st.DataObject) -> None:
    run = data.draw(runs())
    policies = (*LISTS, "static", *OTHERS)
    tiers = data.draw(tiers_for(run, policies, host))
    if host == "inclusive" and data.draw(st.booleans()):
        tiers = replace(tiers, vram=data.draw(rooms(run)), ram=data.draw(rooms(run)))
    for many in range(len(run.calls) + 1):
        layers = run.recorded(many)
        caches = TierCaches(layers, tiers)
        serve_from(caches, layers, all_counted(layers), tiers)
        if host == "exclusive":
            assert not caches.vram_items() & caches.ram_items()
        else:
            without_ram = {i for i in caches.vram_items() if not ram_of(run, tiers.ram, i)}
            assert caches.vram_items() - without_ram <= caches.ram_items()
        for held, room in ((caches.vram_items(), tiers.vram), (caches.ram_items(), tiers.ram)):
            assert fits(run, held, room)


def layer_of(run: Run, item: int) -> int:
    return max(place for place, base in enumerate(run.bases) if base <= item)


def ram_of(run: Run, room: Room, item: int) -> int:
    """The capacity of the RAM that an item may be in."""
    return (room.shared_bytes or 0) if room.slots is None else room.slots[layer_of(run, item)]


def fits(run: Run, items: set[int], room: Room) -> bool:
    if room.slots is None:
        return sum(run.sizes[i] for i in items) <= (room.shared_bytes or 0)
    return all(sum(layer_of(run, i) == place for i in items) <= slots for place, slots in enumerate(room.slots))


@settings(max_examples=40)
@given(st.data())
@pytest.mark.parametrize("on_miss", [LOAD, CPU])
@pytest.mark.parametrize("host", HOST_TIERS)
def test_the_links_balance(host: str, on_miss: str, data: st.DataObject) -> None:
    run = data.draw(runs())
    policies = ("static",) if on_miss == CPU else (*LISTS, "static", *(p for p in OTHERS if p[:6] != "repick"))
    tiers = data.draw(tiers_for(run, policies, host, on_miss))
    answer = served(run, tiers)
    size = np.array([run.layers[place].expert_bytes for place in answer.place])
    assert answer.nvme_bytes is not None and answer.h2d_bytes is not None and answer.d2h_bytes is not None
    assert (answer.nvme_bytes == answer.from_nvme * size).all()
    assert (answer.h2d_bytes == (answer.from_ram + answer.from_nvme - answer.on_cpu) * size).all()
    assert (answer.on_cpu == (answer.from_ram + answer.from_nvme if on_miss == CPU else 0)).all()
    assert (answer.cold <= answer.from_nvme).all()
    distinct = [len({e for row in rows for e in row}) for _, rows in run.calls]
    assert (answer.hits + answer.from_ram + answer.from_nvme == distinct).all()
    before = sum(run.sizes[i] for i in TierCaches(run.recorded(), tiers).vram_items())
    assert answer.d2h_bytes.sum() <= answer.h2d_bytes.sum() + before  # only what came up goes down
    assert host == "exclusive" or not answer.d2h_bytes.any()


@settings(max_examples=60)
@given(st.data(), st.sampled_from([*LISTS, *OTHERS]))
def test_no_ram_is_no_tier_and_ram_for_all_leaves_cold_reads(data: st.DataObject, policy: str) -> None:
    run = data.draw(runs())
    bare = Tiers(parse_policy(policy), data.draw(rooms(run)), Room(slots=(0,) * len(run.layers)))
    without = [columns(served(run, replace(bare, host_tier=host))) for host in HOST_TIERS]
    assert without[0] == without[1] == without[2]
    assert all(ram == 0 and back == 0 for _, ram, _, _, _, _, _, back in without[0])
    plenty = replace(bare, ram=Room(shared_bytes=sum(run.sizes)))
    for host in HOST_TIERS:
        answer = served(run, replace(plenty, host_tier=host))
        if policy[:6] != "repick":  # it may upload what nobody used yet
            assert (answer.from_nvme == answer.cold).all()
        assert total([answer]).hits == sum(hits for hits, *_ in without[0])


@settings(max_examples=80)
@given(st.data())
def test_exclusive_lru_tiers_are_one_lru_of_both(data: st.DataObject) -> None:
    run = data.draw(runs(sizes=(1,)))
    is_shared = data.draw(st.booleans())
    vram, ram = data.draw(rooms(run, is_shared=is_shared)), data.draw(rooms(run, is_shared=is_shared))
    if is_shared:
        both = Room(shared_bytes=(vram.shared_bytes or 0) + (ram.shared_bytes or 0))
    else:
        both = Room(slots=tuple(a + b for a, b in zip(vram.slots or (), ram.slots or (), strict=True)))
    two = served(run, Tiers(parse_policy("lru"), vram, ram))
    one = served(run, Tiers(parse_policy("lru"), both, Room(shared_bytes=0)))
    assert (two.from_nvme == one.from_nvme).all()


def test_with_experts_of_two_sizes_they_are_not() -> None:
    small, large = TraceLayer(0, 3, 1, 2), TraceLayer(1, 3, 1, 3)
    calls = tuple((place, [[e]]) for place, e in [(0, 0), (1, 0), (0, 0), (1, 0)])
    run = Run((small, large), calls)
    two = served(run, Tiers(parse_policy("lru"), Room(shared_bytes=3), Room(shared_bytes=2)))
    one = served(run, Tiers(parse_policy("lru"), Room(shared_bytes=5), Room(shared_bytes=0)))
    assert (two.from_nvme.tolist(), one.from_nvme.tolist()) == ([1, 1, 0, 1], [1, 1, 0, 0])


@settings(max_examples=40)
@given(st.data(), st.sampled_from(["exclusive", "copy-on-read"]))
def test_hits_in_vram_are_those_of_the_curves(data: st.DataObject, host: str) -> None:
    run = data.draw(runs())
    vram, ram = data.draw(rooms(run, is_shared=False)), data.draw(rooms(run))
    for policy, curve in ((parse_policy("lru"), lambda x: lru_curves(x)[DECODE].hits), (BELADY_POLICY, belady_hits)):
        answer = served(run, Tiers(policy, vram, ram, host))
        for place, calls in enumerate(run.recorded()):
            assert answer.hits[answer.place == place].sum() == curve(calls)[(vram.slots or ())[place]]


def test_misses_do_not_push_a_chosen_set_out_of_an_inclusive_ram() -> None:
    uses = [0, 1, 2, 3, 0, 1, 2, 3, 0]
    run = Run((TraceLayer(0, 4, 1, 1),), tuple((0, [[e]]) for e in uses))
    vram, ram = Room(slots=(1,)), Room(slots=(2,))
    chosen = served(run, Tiers(parse_policy("repick:100"), vram, ram, "inclusive"))  # its free slot takes the first miss
    assert chosen.hits.tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 1]
    assert served(run, Tiers(parse_policy("lru"), vram, ram, "inclusive")).hits.sum() == 0
    given = served(run, Tiers(parse_policy("static"), vram, ram, "inclusive", preloaded=((3,),)))
    assert given.hits.tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 0]


def test_what_a_set_gives_up_may_leave_an_inclusive_ram_again() -> None:
    uses = [0, 1, 1, 1, 2, 3, 1]
    run = Run((TraceLayer(0, 4, 1, 1),), tuple((0, [[e]]) for e in uses))
    tiers = Tiers(parse_policy("repick:4"), Room(slots=(1,)), Room(slots=(2,)), "inclusive")
    caches = TierCaches(run.recorded(), tiers)
    answer = serve_from(caches, run.recorded(), all_counted(run.recorded()), tiers)
    assert answer.hits.tolist() == [0] * 6 + [1]  # 0 was the first member, 1 is from the fifth call on
    assert (caches.vram_items(), caches.ram_items()) == ({1}, {1, 3})


def test_what_cannot_be_replayed() -> None:
    run = Run((TraceLayer(0, 4, 1, None),), ((0, [[1]]),))
    with pytest.raises(UsageError, match="the policy lru would have an empty cache"):
        served(run, Tiers(parse_policy("lru"), Room(slots=(1,)), Room(slots=(1,)), on_miss=CPU))
    with pytest.raises(UsageError, match="a tier in bytes needs the bytes of an expert"):
        served(run, Tiers(parse_policy("lru"), Room(slots=(1,)), Room(shared_bytes=10)))


def test_without_sizes_no_bytes() -> None:
    run = Run((TraceLayer(0, 4, 1, None),), ((0, [[1]]), (0, [[2]]), (0, [[1]])))
    answer = total([served(run, Tiers(parse_policy("lru"), Room(slots=(1,)), Room(slots=(1,))))])
    assert answer == Totals(3, 0, 1, 2, 2, 0, 0, None, None, None)
    assert answer.per_token(answer.nvme_bytes) is None
    assert answer.per_token(answer.from_nvme) == 2 / 3


def test_runs_add_up_and_only_counted_calls_count() -> None:
    run = Run((TraceLayer(0, 4, 2, 10),), ((0, [[0, 1]]), (0, [[0, 1], [0, 2]])))
    layers, tiers = run.recorded(), Tiers(parse_policy("lru"), Room(slots=(2,)), Room(slots=(1,)))
    late = serve_tiers(layers, [np.array([False, True])], tiers)
    assert total([late, late]) == Totals(4, 4, 0, 2, 2, 0, 0, 20, 20, 20)


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return read_trace(import_public_trace(tmp_path_factory.mktemp("public")))


def decode_only(trace: Trace) -> list[np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    return [x.phase == DECODE for x in trace.layers]


SAID = {"exclusive": 70, "copy-on-read": 187, "inclusive": 260}
"""NVMe "MiB"/token by an independent replay of the public trace, of which only the results are known: 24 LRU slots in VRAM and
24 in RAM in each layer."""


@pytest.mark.parametrize("host", HOST_TIERS)
def test_public_trace(public: Trace, host: str) -> None:
    slots = Room(slots=(24,) * len(public.layers))
    answer = total([serve_tiers(public.layers, decode_only(public), Tiers(parse_policy("lru"), slots, slots, host))])
    assert answer.tokens == 128
    assert answer.nvme_bytes == READ_BYTES[host]
    assert answer.nvme_bytes / answer.tokens / 1e6 == pytest.approx(SAID[host], rel=0.025)  # as 10^6 bytes


@pytest.mark.parametrize("host", HOST_TIERS)
def test_public_trace_id_by_id(public: Trace, host: str) -> None:
    """In MiB it is the other reading that gives their figures: no calls, but one id after the other."""
    read = sum(id_by_id(calls, host, 24, 24) * (calls.info.expert_bytes or 0) for calls in public.layers)
    assert read / 128 / MIB == pytest.approx(SAID[host], rel=0.02)


def id_by_id(calls: LayerCalls, host: str, vram_slots: int, ram_slots: int) -> int:
    """Decode reads where an id evicts others of its own call, and a victim of VRAM is demoted before the id leaves RAM."""
    vram: dict[int, None] = {}
    ram: dict[int, None] = {}
    reads = 0
    for phase, first, last in zip(calls.phase, calls.row_start, calls.row_start[1:], strict=False):
        for e in calls.ids[first:last].ravel().tolist():
            if e not in vram:
                reads += phase == DECODE and e not in ram
                if host == "exclusive":
                    make_room(vram, vram_slots - 1, lambda gone: into(ram, gone, ram_slots))
                    ram.pop(e, None)
                else:
                    into(ram, e, ram_slots, (lambda gone: vram.pop(gone, None)) if host == "inclusive" else ignore)
            into(vram, e, vram_slots)
    return reads


def ignore(_: int) -> None:
    """What is evicted goes nowhere."""


def into(tier: dict[int, None], item: int, slots: int, gone: Callable[[int], object] = ignore) -> None:
    tier.pop(item, None)
    tier[item] = None
    make_room(tier, slots, gone)


def make_room(tier: dict[int, None], slots: int, gone: Callable[[int], object]) -> None:
    while len(tier) > slots:
        oldest = next(iter(tier))
        del tier[oldest]
        gone(oldest)
