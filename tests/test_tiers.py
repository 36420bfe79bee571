"""Three tiers: equal to a slow model of lists for every host tier, and what must hold whatever the routes are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.errors import UsageError
from bel.formats.trace import DECODE
from bel.formats.trace_header import TraceLayer
from bel.profiler.belady import belady_hits
from bel.profiler.curves import lru_curves
from bel.profiler.replay import BELADY_POLICY
from bel.profiler.tier_caches import CPU, HOST_TIERS, LOAD, Room, TierCaches, Tiers
from bel.profiler.tier_links import Totals, serve_from, serve_tiers, total
from bel.runtime.policies import parse_policy
from tier_model import Slow
from tier_runs import LISTS, OTHERS, Run, all_counted, columns, rooms, runs, served, tiers_for


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
