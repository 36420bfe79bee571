"""One call of a layer's router: what must be copied where, what the CPU computes, and which ids the home's products get.

The cache policies decide (`cache_step.py`); here their experts get slots.  Plain Python or compiled: the same source.

Only a call of one row computes with slots for ids: a GPU's kernels for many rows split the work by the experts' order, and
with other ids they would sum in another order than stock's.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bel.runtime.cache_rows import (
    CONFIG,
    COUNT,
    INCREMENT,
    KIND,
    MISSED,
    NUMBERS,
    OWN,
    RESIDENT,
    VICTIMS,
    Floats,
    Ints,
)
from bel.runtime.cache_step import serve
from bel.runtime.compiled import compiled_if_possible
from bel.runtime.policies import LFU_DECAY, LFUDA

UPLOAD, SPLIT, STATIC = range(3)
"""How misses are met in calls of one row: all uploaded, some uploaded and the others computed on the CPU, all computed."""

# Rows of a layer's table of slots, i64: by expert its slot or -1, by slot its expert or -1, the free slots as a stack, marks
# of the slots that a call uses, (places below) numbers, and by expert the number, from 1, of those that were brought to the
# stage for this call, or 0.
SLOT_OF, EXPERT_IN, FREE, USED_BY, NUMBER, AHEAD = range(6)
TABLE_ROWS = 6
N_FREE, CALLS = range(2)

# Rows of what a call asks for, i64: its distinct experts, and where each stood before (-1: nowhere); experts to be brought
# into slots, and those; ranks whose experts the CPU computes, and those; the ids of a single row, as slots.
DISTINCT, STOOD, LOAD, TO, RANK, ABSENT, ROW = range(7)
ASK_ROWS = 7

STAGE_SHARE = 0.75
"""Where a prompt uses so many of a layer's experts, all of the next one's are brought before its router has chosen.  Where it
picks the same few for all tokens most of them would come in vain."""

_ROUNDING = 1e-9  # of a share such as 0.3: 10 misses of it are 3


def slot_table(n_expert: int, n_slots: int) -> Ints:
    """A layer's table of slots, all of them free."""
    table = np.full((TABLE_ROWS, max(n_expert, 2)), -1, np.int64)
    table[FREE, :n_slots] = np.arange(n_slots)[::-1]
    table[NUMBER], table[AHEAD] = 0, 0
    table[NUMBER, N_FREE] = n_slots
    return table


@compiled_if_possible
def uses_nearly_all(distinct: int, n_expert: int) -> bool:
    """Whether the next layer's stage is to be filled early, behind a call that used so many experts."""
    return distinct >= STAGE_SHARE * n_expert


@compiled_if_possible
def plan_call(
    ints: Ints,
    reals: Floats,
    table: Ints,
    ask: Ints,
    ids: npt.NDArray[np.uint16],
    row: npt.NDArray[np.uint16],
    mode: int,
    share: float,
) -> tuple[int, int, int, int]:
    """Serve the call `ids` (rows, top_k).  `row` (top_k,) is room.  `share`: of the misses, for SPLIT.

    Returns (distinct, missed, loads, absent).  A call of one row goes through the slots: `loads` are to be brought there, the
    ids become those in `ask[ROW]`, which for the `absent` experts that the CPU computes are slots that the call does not use
    otherwise.  A call of more rows goes through the stage: all its `distinct` experts are to be brought there, before the
    `loads` are brought to their slots, and the ids stay as they are.
    """
    rows, top_k = ids.shape
    table[NUMBER, CALLS] += 1
    uncounted, missed = 0, 0
    part = ids
    if rows == 1 and mode == SPLIT:
        kept, missed = _keep(ints, reals, table, ids, row, share)
        part = row[:kept].reshape((1, kept))
        uncounted = top_k - kept
    # One place to call it from: the compiler copies it, the largest function by far, to each.
    distinct, entered, victims, cut, _ = serve(ints, reals, part, 0, rows, 0, True)
    for i in range(distinct):
        ask[DISTINCT, i] = ints[OWN, i]
        ask[STOOD, i] = table[SLOT_OF, ints[OWN, i]]
    missed = max(missed, entered)
    distinct += uncounted
    loads = _assign(ints, table, ask, entered, victims + cut)
    return distinct, missed, loads, _name_row(table, ask, ids) if rows == 1 else 0


@compiled_if_possible
def _keep(
    ints: Ints, reals: Floats, table: Ints, ids: npt.NDArray[np.uint16], row: npt.NDArray[np.uint16], share: float
) -> tuple[int, int]:
    """Put the experts that are resident, brought ahead, or to be uploaded into `row`; the numbers of those and of all misses.

    The others' uses are counted where the policy counts uses: they must be able to earn a slot.
    """
    top_k = ids.shape[1]
    missed, ahead = 0, 0
    for rank in range(top_k):
        item = np.int64(ids[0, rank])
        if not ints[RESIDENT, item]:
            missed += 1
            ahead += table[AHEAD, item] > 0
    uploads = math.ceil((missed - ahead) * share - _ROUNDING)
    kept = 0
    passed = 0
    for rank in range(top_k):
        item = np.int64(ids[0, rank])
        if not ints[RESIDENT, item] and table[AHEAD, item] == 0:
            passed += 1
            if passed > uploads:
                if ints[CONFIG, KIND] == LFU_DECAY or ints[CONFIG, KIND] == LFUDA:
                    reals[COUNT, item] += reals[NUMBERS, INCREMENT]
                continue
        row[kept] = ids[0, rank]
        kept += 1
    return kept, missed


@compiled_if_possible
def _assign(ints: Ints, table: Ints, ask: Ints, entered: int, given_up: int) -> int:
    """Take the slots of experts that are no longer resident, and give them to those that are now.  Returns how many.

    `entered` of the call's experts were not resident before; some of them may be given up again.
    """
    free = table[NUMBER, N_FREE]
    for i in range(given_up):
        item = ints[VICTIMS, i]
        slot = table[SLOT_OF, item]
        if slot >= 0:
            table[SLOT_OF, item], table[EXPERT_IN, slot] = -1, -1
            table[FREE, free] = slot
            free += 1
    loads = 0
    for i in range(entered):
        item = ints[MISSED, i]
        if ints[RESIDENT, item] and table[SLOT_OF, item] < 0:
            free -= 1
            slot = table[FREE, free]
            table[SLOT_OF, item], table[EXPERT_IN, slot] = slot, item
            ask[LOAD, loads], ask[TO, loads] = item, slot
            loads += 1
    table[NUMBER, N_FREE] = free
    return loads


@compiled_if_possible
def _name_row(table: Ints, ask: Ints, ids: npt.NDArray[np.uint16]) -> int:
    """Name the slots of a single row; how many of its experts have none."""
    top_k = ids.shape[1]
    call = table[NUMBER, CALLS]
    absent = 0
    for rank in range(top_k):
        item = np.int64(ids[0, rank])
        slot = table[SLOT_OF, item]
        ask[ROW, rank] = slot
        if slot >= 0:
            table[USED_BY, slot] = call
        else:
            ask[RANK, absent], ask[ABSENT, absent] = rank, item
            absent += 1
    other = 0
    for i in range(absent):
        while table[USED_BY, other] == call:
            other += 1
        ask[ROW, ask[RANK, i]] = other
        other += 1
    return absent
