"""The slots of each layer as arrays: what is in which, what the policy remembers, and room for what a call asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bel.runtime.cache_rows import Ints
from bel.runtime.cache_state import CacheState, make_cache, preload
from bel.runtime.policies import Policy
from bel.runtime.pool_step import ASK_ROWS, CONTENT, EXPERT_IN, FREE, N_FREE, NUMBER, SLOT_OF, slot_table


@dataclass(frozen=True, slots=True)
class LayerSlots:
    """One layer.  `table` as `pool_step.py` has it, `ask` and `row` its room.  Of `n_slots` the policy fills all but `n_spare`,
    its `cache` has that capacity: what is brought ahead of its use goes to the slots that are free.
    """

    n_expert: int
    n_slots: int
    n_spare: int
    top_k: int
    cache: CacheState
    table: Ints
    ask: Ints
    row: npt.NDArray[np.uint16]

    @property
    def in_slots(self) -> list[int]:
        """The expert in each slot, -1 where it is free."""
        return [int(x) for x in self.table[EXPERT_IN, : self.n_slots]]

    def preload(self, wanted: Sequence[int]) -> list[tuple[int, int]]:
        """Make experts resident before the first call, most wanted first, as far as there is room: (expert, slot) each."""
        pairs = []
        for expert in preload(self.cache, wanted):
            free = int(self.table[NUMBER, N_FREE]) - 1
            slot = int(self.table[FREE, free])
            self.table[NUMBER, N_FREE] = free
            self.table[SLOT_OF, expert], self.table[EXPERT_IN, slot] = slot, expert
            self.table[CONTENT, slot] = expert
            pairs.append((expert, slot))
        return pairs


def layer_slots(n_expert: int, n_slots: int, top_k: int, policy: Policy, n_spare: int = 0) -> LayerSlots:
    """An empty layer.  Slots for all experts need no spare ones, and a token's experts all have one that is not spare."""
    n_spare = 0 if n_slots >= n_expert else max(0, min(n_spare, n_slots - top_k))
    cache = make_cache(policy, np.ones(n_expert, np.int64), n_slots - n_spare)
    ask = np.zeros((ASK_ROWS, n_expert), np.int64)
    table = slot_table(n_expert, n_slots)
    return LayerSlots(n_expert, n_slots, n_spare, top_k, cache, table, ask, np.zeros(top_k, np.uint16))
