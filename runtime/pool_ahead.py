"""Bringing experts to the stage ahead of their use: the request, the thread that answers it, and its end, in compiled code.

One request is open at a time.  Behind a layer's choice the callback asks for the next layer's experts; a thread of its own has
the guess computed, and brings the likeliest that are missing to the stage, which single tokens do not need otherwise, while the
home computes the layer.  Behind the next layer's choice the callback takes back what was not begun, and has those that were
chosen copied from the stage to their slots.  The policy knows nothing of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from bel.runtime import guess_gate
from bel.runtime import pool_rows as at
from bel.runtime.pool_copies import put_experts
from bel.runtime.pool_counters import AHEAD_BYTES
from bel.runtime.pool_step import AHEAD, SLOT_OF, TABLE_ROWS
from bel.runtime.pool_words import call, compiled, load, now, pointer, store, swap, table, words


@compiled
def _state(root: Any) -> int:
    """The address of the request's state."""
    return int(root[at.AHEAD] + 8 * at.STATE)


@compiled
def settle(root: Any, i: int, slots: Any, ids: Any, counts: Any) -> int:
    """Before a call of layer i, `ids` (rows, top_k), is served: mark what was brought for it, `slots[AHEAD]`.

    Returns how many marks there are.  Nobody brings anything any more until the next request.
    """
    ahead, address = words(root[at.AHEAD], at.AHEAD_SIZE), _state(root)
    state = load(address)
    number = state - state % at.N_STATES
    if state == number + at.REQUESTED and swap(address, state, number + at.IDLE):
        return 0
    while load(address) == number + at.CLAIMED:
        call(root[at.YIELD], 0, 0, 0, 0, 0)
    if load(address) != number + at.DONE_AHEAD:
        return 0
    store(address, number + at.IDLE)
    brought = ahead[at.N_BROUGHT]
    parts = table(root[at.PARTS] + 8 * ahead[at.FOR_LAYER] * at.N_PARTS * at.PART, at.N_PARTS, at.PART)
    for p in range(at.N_PARTS):
        counts[AHEAD_BYTES] += brought * parts[p, at.STRIDE]
    if ahead[at.FOR_LAYER] != i or len(ids) != 1:
        return 0
    guesses = words(ahead[at.GUESSES], at.MOST_GUESSES)
    used = 0
    for n in range(brought):
        slots[AHEAD, guesses[n]] = n + 1
        for rank in range(ids.shape[1]):
            if ids[0, rank] == guesses[n]:
                used += 1
    guess_gate.count(words(ahead[at.GATE], 4), used, brought - used)
    return int(brought)


@compiled
def request(root: Any, i: int, layer: Any) -> None:
    """Behind a single row's choice in layer i, once all its copies were begun: ask for the next layer's experts."""
    ahead = words(root[at.AHEAD], at.AHEAD_SIZE)
    if ahead[at.MOST_AHEAD] == 0 or i + 1 >= root[at.N_LAYERS] or words(ahead[at.GUESS_GRAPHS], root[at.N_LAYERS])[i] == 0:
        return
    if not guess_gate.is_open(words(ahead[at.GATE], 4), at.MOST_IN_VAIN):
        return
    # The router saw it, so it is there: the guess need not wait for the graph's stream.
    tensor = words(ahead[at.INPUT_TENSORS], root[at.N_LAYERS])[i]
    words(tensor + root[at.AT_DATA], 1)[0] = words(layer[at.INPUT_NODE] + root[at.AT_DATA], 1)[0]
    ahead[at.FOR_LAYER] = i + 1
    state = load(_state(root))
    store(_state(root), state - state % at.N_STATES + at.N_STATES + at.REQUESTED)
    if load(root[at.AHEAD] + 8 * at.IS_ASLEEP) != 0:  # if it falls asleep right now it misses this one
        words(ahead[at.AHEAD_ROOM], 2)[0] = 1
        call(root[at.WRITE], ahead[at.AHEAD_FD], ahead[at.AHEAD_ROOM], 8, 0, 0)


@compiled
def bring(root: Any, ahead: Any, i: int) -> None:
    """Begin to bring the likeliest missing experts of layer i to the stage, likeliest first, of the top-k likeliest."""
    layer = words(root[at.LAYERS] + 8 * i * at.LAYER, at.LAYER)
    slots = table(layer[at.TABLE], TABLE_ROWS, layer[at.TABLE_COLUMNS])
    scores = carray(pointer(ahead[at.SCORES]), (layer[at.N_EXPERT],), np.float32)
    guesses = words(ahead[at.GUESSES], at.MOST_GUESSES)
    # From the stage the layer before may still be copied to its slots, and what it waits for comes first on the link.
    for event in (root[at.KEPT_EVENT], root[at.COPIED_EVENT]):
        if event != 0:
            call(root[at.EVENT_WAIT], ahead[at.FETCH_BACKEND], event, 0, 0, 0)
    parts = table(root[at.PARTS] + 8 * i * at.N_PARTS * at.PART, at.N_PARTS, at.PART)
    events = words(ahead[at.FETCHED_EVENTS], at.MOST_GUESSES)
    backend = ahead[at.FETCH_BACKEND]
    brought = 0
    for _ in range(layer[at.TOP_K]):
        best = -1
        for expert in range(layer[at.N_EXPERT]):
            if scores[expert] > -np.inf and (best < 0 or scores[expert] > scores[best]):
                best = expert
        if best < 0 or brought == ahead[at.MOST_AHEAD]:
            break
        scores[best] = -np.inf
        if slots[SLOT_OF, best] < 0:
            put_experts(root, backend, layer, parts, best, 1, at.STAGE_AT, best)
            if events[brought] != 0:
                call(root[at.EVENT_RECORD], events[brought], backend, 0, 0, 0)
            guesses[brought] = best
            brought += 1
    if events[0] == 0:  # whoever uses them has nothing else to wait for
        call(root[at.SYNCHRONIZE], backend, 0, 0, 0, 0)
    ahead[at.N_BROUGHT] = brought


@compiled
def _wait_for_request(root: Any, ahead: Any) -> int:
    """The next request's state; 0 where the thread is to end."""
    began = now(root, ahead[at.AHEAD_CLOCK])
    while True:
        state = load(_state(root))
        if state % at.N_STATES == at.REQUESTED:
            return int(state)
        if load(root[at.AHEAD] + 8 * at.AHEAD_STOP) != 0:
            return 0
        if now(root, ahead[at.AHEAD_CLOCK]) - began < root[at.SPIN_NS]:
            call(root[at.YIELD], 0, 0, 0, 0, 0)
        else:
            store(root[at.AHEAD] + 8 * at.IS_ASLEEP, 1)
            call(root[at.READ], ahead[at.AHEAD_FD], ahead[at.AHEAD_ROOM] + 8, 8, 0, 0)  # until something is written
            store(root[at.AHEAD] + 8 * at.IS_ASLEEP, 0)
            began = now(root, ahead[at.AHEAD_CLOCK])


@compiled
def look_ahead(user_data: int) -> None:
    """The thread: answer requests until it is asked to stop."""
    root = words(user_data, at.ROOT_SIZE)
    ahead, address = words(root[at.AHEAD], at.AHEAD_SIZE), _state(root)
    while True:
        state = _wait_for_request(root, ahead)
        if state == 0:
            return
        # While it is busy nobody frees what it reads; what was taken back just before need not be there any more.
        busy = root[at.AHEAD] + 8 * at.IS_BUSY
        swap(busy, 0, 1)
        if load(address) != state:
            store(busy, 0)
            continue
        i = ahead[at.FOR_LAYER]
        graph = words(ahead[at.GUESS_GRAPHS], root[at.N_LAYERS])[i - 1]
        status = call(root[at.GRAPH_COMPUTE], ahead[at.GUESS_BACKEND], graph, 0, 0, 0) & 0xFFFFFFFF
        store(busy, 0)
        if status != 0:
            store(root[at.AHEAD] + 8 * at.AHEAD_STATUS, status)
        # Taken back meanwhile, or asked anew: then these scores are for nothing, and its slots are not ours.
        if status == 0 and swap(address, state, state - at.REQUESTED + at.CLAIMED):
            bring(root, ahead, i)
            store(address, state - at.REQUESTED + at.DONE_AHEAD)
        elif status != 0:
            swap(address, state, state - at.REQUESTED + at.IDLE)
