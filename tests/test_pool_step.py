"""What a call asks of the slots, for random calls: every expert that is to be in a slot is in one of its own, what was not
asked for stays where it was, and the ids that the home's products get are distinct slots."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bel.runtime.cache_rows import COUNT
from bel.runtime.cache_state import make_cache, preload, residents, step
from bel.runtime.policies import parse_policy
from bel.runtime.pool_layers import LayerSlots, layer_slots
from bel.runtime.pool_options import MODES
from bel.runtime.pool_step import ABSENT, DISTINCT, LOAD, RANK, ROW, STOOD, TO, plan_call

WAYS = [
    ("upload", "lru"),
    ("upload", "lfu-decay:0.9"),
    ("upload", "s3fifo"),
    ("static", "static"),
    ("split", "lru"),
    ("split", "lfu-decay:0.9"),
]


@dataclass
class Played:
    """A layer, and what its slots hold as the copies that were asked for leave them."""

    layer: LayerSlots
    mode: int
    share: float
    held: dict[int, int] = field(default_factory=dict)

    def call(self, ids: np.ndarray[tuple[int, int], np.dtype[np.uint16]]) -> tuple[int, int, int, int]:
        """Serve a call, carry out its copies, and check all that holds for any call."""
        layer, ask = self.layer, self.layer.ask
        before = dict(self.held)
        cache = layer.cache
        distinct, missed, loads, absent = plan_call(
            cache.ints, cache.reals, layer.table, ask, ids, layer.row, self.mode, self.share
        )
        chosen = set(ids.reshape(-1).tolist())
        assert distinct == len(chosen)
        assert missed == len(chosen - set(before.values()))
        self.held |= dict(zip(ask[TO, :loads].tolist(), ask[LOAD, :loads].tolist(), strict=True))
        assert len(set(ask[TO, :loads].tolist())) == loads
        assert all(slot < layer.n_slots for slot in self.held)
        listed = {slot: expert for slot, expert in enumerate(layer.in_slots) if expert >= 0}
        assert listed.items() <= self.held.items(), "what is believed to be in a slot was copied there, and not written over"
        assert sorted(listed.values()) == residents(cache)
        self.held = listed
        if len(ids) == 1:
            self._check_row(ids[0].tolist(), absent, before)
        else:
            assert absent == 0
            self._check_stage(chosen, distinct, before)
        return distinct, missed, loads, absent

    def _check_row(self, ids: list[int], absent: int, before: dict[int, int]) -> None:
        ask = self.layer.ask
        row = ask[ROW, : len(ids)].tolist()
        assert len(set(row)) == len(row), "kernels of a GPU assume that ids are distinct"
        assert all(0 <= slot < self.layer.n_slots for slot in row)
        ranks, experts = ask[RANK, :absent].tolist(), ask[ABSENT, :absent].tolist()
        assert [ids[rank] for rank in ranks] == experts
        assert not set(experts) & set(before.values()), "the CPU computes none that is there"
        for rank, expert in enumerate(ids):
            assert rank in ranks or self.held[row[rank]] == expert

    def _check_stage(self, chosen: set[int], distinct: int, before: dict[int, int]) -> None:
        ask = self.layer.ask
        assert set(ask[DISTINCT, :distinct].tolist()) == chosen
        for expert, slot in zip(ask[DISTINCT, :distinct].tolist(), ask[STOOD, :distinct].tolist(), strict=True):
            assert (slot < 0 and expert not in before.values()) or before[slot] == expert


@pytest.mark.parametrize(("mode", "policy"), WAYS)
@given(data=st.data())
def test_any_calls(mode: str, policy: str, data: st.DataObject) -> None:
    """Of one row and of many, from the least number of slots to all, preloaded or not."""
    n_expert = data.draw(st.integers(2, 12))
    top_k = data.draw(st.integers(1, n_expert))
    n_slots = data.draw(st.integers(top_k, n_expert))
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    layer = layer_slots(n_expert, n_slots, top_k, parse_policy(policy))
    played = Played(layer, MODES[mode], data.draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])))
    wanted = random.permutation(n_expert)[: data.draw(st.integers(0, n_expert))].tolist()
    played.held = {slot: expert for expert, slot in layer.preload(wanted)}
    for _ in range(data.draw(st.integers(1, 12))):
        rows = data.draw(st.sampled_from([1, 1, 1, 2, 5]))
        ids = np.stack([random.permutation(n_expert)[:top_k] for _ in range(rows)]).astype(np.uint16)
        _, missed, loads, absent = played.call(ids)
        if rows == 1:
            assert loads + absent == missed
            uploaded = {"upload": missed, "static": 0}.get(mode, int(np.ceil(missed * played.share - 1e-9)))
            assert loads == uploaded


@pytest.mark.parametrize("policy", ["lru", "lfu-decay:0.95", "arc"])
def test_uploading_all_misses_is_the_policy_itself(policy: str) -> None:
    """As the simulator steps it, whether all misses are uploaded or a share of 1."""
    random = np.random.default_rng(5)
    reference = make_cache(parse_policy(policy), np.ones(16, np.int64), 6)
    preload(reference, [3, 1, 4])
    layers = [layer_slots(16, 6, 4, parse_policy(policy)) for _ in range(2)]
    both = [Played(layer, MODES[mode], 1.0) for layer, mode in zip(layers, ("upload", "split"), strict=True)]
    for played in both:
        played.held = {slot: expert for expert, slot in played.layer.preload([3, 1, 4])}
    for _ in range(200):
        rows = int(random.choice([1, 1, 3]))
        ids = np.stack([random.permutation(16)[:4] for _ in range(rows)]).astype(np.uint16)
        expected = step(reference, ids)
        for played in both:
            assert played.call(ids)[:2] == (expected.distinct, len(expected.missed))
            assert residents(played.layer.cache) == residents(reference)


def test_an_expert_that_the_cpu_computes_can_earn_a_slot() -> None:
    """Uses of what is missing count too: as soon as it is the first of the misses its count keeps it in its slot."""
    layer = layer_slots(8, 2, 2, parse_policy("lfu-decay:1"))
    played = Played(layer, MODES["split"], 0.5)
    played.held = {slot: expert for expert, slot in layer.preload([0, 1])}
    for _ in range(4):
        played.call(np.array([[6, 7]], np.uint16))
    assert layer.cache.reals[COUNT, [6, 7]].tolist() == [4, 4]
    assert sorted(played.held.values()) == [6, 7]
