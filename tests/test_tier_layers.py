"""The tiers of a layer, step by step: every expert is where they say, with its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.trace import DECODE
from bel.formats.trace_header import TraceLayer
from bel.profiler.tier_caches import Room, TierCaches, Tiers
from bel.profiler.tier_links import serve_from
from bel.runtime.policies import parse_policy
from bel.runtime.pool_layers import layer_slots
from bel.runtime.tier_layers import HOST_TIERS, LayerTiers, TierPlan
from routes import layer_calls, some_row


class Memories:
    """What stands in the slots of a layer while plans are carried out in the order in which a mover does it."""

    def __init__(self) -> None:
        self.vram: dict[int, int] = {}
        self.ram: dict[int, int] = {}

    def carry_out(self, plan: TierPlan) -> None:
        for expert, slot in plan.hits:
            assert self.vram[slot] == expert
        for fetch in plan.from_nvme:
            if fetch.ram_slot is not None and not fetch.is_late:
                self.ram[fetch.ram_slot] = fetch.expert
        for expert, slot in plan.from_ram:
            assert self.ram[slot] == expert, "reads that came early left alone what the call loads"
        for demotion in plan.demoted:
            assert self.vram[demotion.vram_slot] == demotion.expert
            self.ram[demotion.ram_slot] = demotion.expert
        for fetch in plan.from_nvme:
            if fetch.ram_slot is not None and fetch.is_late:
                self.ram[fetch.ram_slot] = fetch.expert
        for expert, slot in plan.loads:
            self.vram[slot] = expert


@settings(max_examples=150, deadline=None)
@given(st.data())
@pytest.mark.parametrize("host_tier", HOST_TIERS)
def test_each_call_leaves_every_expert_in_its_place(host_tier: str, data: st.DataObject) -> None:
    """Whatever the router chooses: one place each, with the expert's bytes in it, and the simulator's tiers and counts."""
    n_expert, top_k = data.draw(st.integers(3, 8)), data.draw(st.integers(1, 3))
    n_slots, n_ram = data.draw(st.integers(top_k, n_expert)), data.draw(st.integers(0, n_expert))
    if host_tier == "inclusive" and n_ram:
        n_ram = max(n_ram, n_slots)
    policy = parse_policy(data.draw(st.sampled_from(["lru", "lfu-decay:0.5", "arc", "slru"])))
    rows = st.lists(some_row(n_expert, top_k), min_size=1, max_size=4)
    calls = data.draw(st.lists(st.one_of(rows.map(lambda x: x[:1]), rows), min_size=1, max_size=20))
    layer, memories = LayerTiers(layer_slots(n_expert, n_slots, top_k, policy), n_ram, host_tier), Memories()
    layers = [layer_of_calls(calls, n_expert, top_k)]
    tiers = Tiers(policy, Room(slots=(n_slots,)), Room(slots=(n_ram,)), host_tier)
    caches = TierCaches(layers, tiers)
    answer = serve_from(caches, layers, [np.ones(len(calls), np.bool_)], tiers)
    assert answer.d2h_bytes is not None
    for c, call in enumerate(calls):
        plan = layer.serve(np.array(call, np.uint16))
        memories.carry_out(plan)
        layer.check()
        assert set(plan.distinct) == {expert for row in call for expert in row}
        assert len(call) > 1 or [memories.vram[slot] for slot in plan.slots.tolist()] == call[0]
        assert (len(plan.hits), len(plan.from_ram)) == (answer.hits[c], answer.from_ram[c])
        assert (len(plan.from_nvme), plan.cold) == (answer.from_nvme[c], answer.cold[c])
        assert len(plan.demoted) + plan.spared == answer.d2h_bytes[c]
        assert plan.spared >= 0
        check_places(layer, memories)
    assert places_of(layer) == (caches.vram_items(), caches.ram_items())


def layer_of_calls(calls: Sequence[Sequence[Sequence[int]]], n_expert: int, top_k: int) -> Any:
    """One layer's calls, with experts of one byte."""
    return replace(layer_calls([(DECODE, call) for call in calls], n_expert, top_k), info=TraceLayer(0, n_expert, top_k, 1))


def places_of(layer: LayerTiers) -> tuple[set[int], set[int]]:
    places = {expert: layer.owners.place(expert) for expert in range(layer.slots.n_expert)}
    in_vram = {expert for expert, place in places.items() if place.vram_slot is not None}
    return in_vram, {expert for expert, place in places.items() if place.ram_slot is not None}


def check_places(layer: LayerTiers, memories: Memories) -> None:
    for expert in range(layer.slots.n_expert):
        place = layer.owners.place(expert)
        assert place.vram_slot is None or memories.vram[place.vram_slot] == expert
        assert place.ram_slot is None or memories.ram[place.ram_slot] == expert


def test_an_expert_in_two_places_is_found() -> None:
    """The check of the owners can fail."""
    layer = LayerTiers(layer_slots(6, 2, 1, parse_policy("lru")), 2, "exclusive")
    for expert in (0, 1, 2):
        layer.serve(np.array([[expert]], np.uint16))
    layer.check()
    assert places_of(layer) == ({1, 2}, {0})
    layer.ram.ints[2, 0] = 0  # RESIDENT
    with pytest.raises(AssertionError, match="the tables are not the caches"):
        layer.check()
