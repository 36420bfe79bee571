"""Where each expert of a layer stands: in a slot of the home, in a slot of host memory, or on the disk alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bel.runtime.cache_rows import CAPACITY, CONFIG, RESIDENT, USED, Ints
from bel.runtime.pool_step import EXPERT_IN, FREE, N_FREE, NUMBER, SLOT_OF
from bel.runtime.tier_step import EXCLUSIVE

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class Place:
    """The slots that hold an expert, None where none does.  With neither it is on the disk alone."""

    vram_slot: int | None
    ram_slot: int | None


@dataclass(frozen=True, slots=True)
class Owners:
    """The one table of a layer's places: a table of slots (`pool_step.slot_table`) of the home, and one of host memory."""

    vram: Ints
    ram: Ints
    n_expert: int

    def place(self, expert: int) -> Place:
        """Where an expert stands."""
        slots = (int(table[SLOT_OF, expert]) for table in (self.vram, self.ram))
        return Place(*(None if slot == NO_SLOT else slot for slot in slots))

    def check(self, vram_state: Ints, ram_state: Ints, kind: int) -> None:
        """Raise AssertionError where the table is not what the caches of the two tiers say, or not of its `kind`.

        In an exclusive one every expert has exactly one place; in an inclusive one host memory has all that the home has.
        """
        for table, state in ((self.vram, vram_state), (self.ram, ram_state)):
            slots = table[SLOT_OF, : self.n_expert]
            held = np.flatnonzero(slots != NO_SLOT)
            assert np.array_equal(held, np.flatnonzero(state[RESIDENT, : self.n_expert])), "the tables are not the caches"
            assert np.array_equal(table[EXPERT_IN, slots[held]], held), "an expert's slot holds another one"
            assert len(np.unique(slots[held])) == len(held), "two experts have one slot"
            assert len(held) == state[CONFIG, USED] <= state[CONFIG, CAPACITY], "more experts than slots"
            free = table[FREE, : table[NUMBER, N_FREE]]
            assert sorted([*free, *slots[held]]) == list(range(state[CONFIG, CAPACITY])), "a slot is lost"
        in_vram, in_ram = (table[SLOT_OF, : self.n_expert] != NO_SLOT for table in (self.vram, self.ram))
        if kind == EXCLUSIVE:
            assert not (in_vram & in_ram).any(), "an expert has two places"
        elif ram_state[CONFIG, CAPACITY]:
            assert not (in_vram & ~in_ram).any(), "the home has what host memory has not"


def take(table: Ints, expert: int) -> int:
    """Give an expert a free slot; there must be one."""
    free = int(table[NUMBER, N_FREE]) - 1
    assert free >= 0, "the cache and its slots are of one size"
    slot = int(table[FREE, free])
    table[NUMBER, N_FREE] = free
    table[SLOT_OF, expert], table[EXPERT_IN, slot] = slot, expert
    return slot


def release(table: Ints, expert: int) -> int:
    """Free an expert's slot."""
    slot = int(table[SLOT_OF, expert])
    table[SLOT_OF, expert], table[EXPERT_IN, slot] = NO_SLOT, NO_SLOT
    table[FREE, table[NUMBER, N_FREE]] = slot
    table[NUMBER, N_FREE] += 1
    return slot


def has_free(table: Ints) -> bool:
    """Whether a slot is free."""
    return bool(table[NUMBER, N_FREE])
