"""Bringing experts to free slots ahead of their use: the request, the thread that answers it, and its end, in compiled code.

One request is open at a time.  Behind a layer's choice the callback asks for the next layer's experts; a thread of its own has
the guess computed, and brings the likeliest that are missing while the home computes the layer.  The callback takes back what
was not begun when the next layer's choice is there, so the slots of a layer have one writer at any time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from bel.runtime import guess_gate
from bel.runtime import pool_rows as at
from bel.runtime.pool_copies import host_address
from bel.runtime.pool_counters import AHEAD_BYTES
from bel.runtime.pool_step import CONTENT, EARLY, FREE, N_FREE, NUMBER, SLOT_OF, TABLE_ROWS, place_held
from bel.runtime.pool_words import call, compiled, load, now, pointer, store, swap, table, words


@compiled
def _state(root: Any) -> int:
    """The address of the request's state."""
    return int(root[at.AHEAD] + 8 * at.STATE)


@compiled
def settle(root: Any, i: int, parts: Any, ids: Any, counts: Any) -> None:
    """Before a call of layer i, `ids` (rows, top_k), is served: from here on nobody else looks at its slots."""
    ahead, address = words(root[at.AHEAD], at.AHEAD_SIZE), _state(root)
    state = load(address)
    number = state - state % at.N_STATES
    if state == number + at.REQUESTED and swap(address, state, number + at.IDLE):
        return
    while load(address) == number + at.CLAIMED:
        call(root[at.YIELD], 0, 0, 0, 0, 0)
    if load(address) != number + at.DONE_AHEAD:
        return
    store(address, number + at.IDLE)
    brought = ahead[at.N_BROUGHT]
    if brought == 0:
        return
    for p in range(at.N_PARTS):
        counts[AHEAD_BYTES] += brought * parts[p, at.STRIDE]
    if ahead[at.FOR_LAYER] != i or len(ids) != 1:
        return
    guesses = words(ahead[at.GUESSES], at.MOST_GUESSES)
    used = 0
    for n in range(brought):
        for rank in range(ids.shape[1]):
            if ids[0, rank] == guesses[n]:
                used += 1
    guess_gate.count(words(ahead[at.GATE], 4), used, brought - used)


@compiled
def request(root: Any, i: int, layer: Any) -> None:
    """Behind a single row's choice in layer i: ask for the next layer's experts."""
    ahead = words(root[at.AHEAD], at.AHEAD_SIZE)
    if ahead[at.MOST_AHEAD] == 0 or i + 1 >= root[at.N_LAYERS] or words(ahead[at.GUESS_GRAPHS], root[at.N_LAYERS])[i] == 0:
        return
    if not guess_gate.is_open(words(ahead[at.GATE], 4)):
        return
    graph = root[at.GRAPH_BACKEND]
    call(root[at.COPY_ASYNC], graph, graph, layer[at.INPUT_NODE], ahead[at.INPUT_TENSOR], 0)
    if ahead[at.INPUT_EVENT] != 0:
        call(root[at.EVENT_RECORD], ahead[at.INPUT_EVENT], graph, 0, 0, 0)
    ahead[at.FOR_LAYER] = i + 1
    state = load(_state(root))
    store(_state(root), state - state % at.N_STATES + at.N_STATES + at.REQUESTED)
    words(ahead[at.AHEAD_ROOM], 2)[0] = 1
    call(root[at.WRITE], ahead[at.AHEAD_FD], ahead[at.AHEAD_ROOM], 8, 0, 0)


@compiled
def _is_guessed(ahead: Any, guessed: int, expert: int) -> bool:
    guesses = words(ahead[at.GUESSES], at.MOST_GUESSES)
    found = False
    for n in range(guessed):
        found = found or guesses[n] == expert
    return found


@compiled
def _fetch(root: Any, ahead: Any, i: int, layer: Any, expert: int, slot: int) -> None:
    """Begin to bring an expert and its biases to a slot of layer i."""
    parts = table(root[at.PARTS] + 8 * i * at.N_PARTS * at.PART, at.N_PARTS, at.PART)
    backend, home = ahead[at.FETCH_BACKEND], root[at.HOME_TENSOR]
    for p in range(at.N_PARTS):
        size = parts[p, at.STRIDE]
        source = host_address(layer, parts, p, expert)
        call(root[at.SET_ASYNC], backend, home, source, parts[p, at.SLOTS_AT] + slot * size, size)
    biases = table(root[at.BIASES] + 8 * i * at.N_PARTS * at.BIAS, at.N_PARTS, at.BIAS)
    for b in range(layer[at.N_BIASES]):
        size = biases[b, at.BIAS_STRIDE]
        target = biases[b, at.BIAS_SLOTS_AT] + slot * size
        call(root[at.SET_ASYNC], backend, home, biases[b, at.BIAS_ROWS] + expert * size, target, size)


@compiled
def bring(root: Any, ahead: Any, i: int) -> None:
    """Begin to bring the likeliest missing experts of layer i to its free slots, likeliest first, as far as there are such."""
    layer = words(root[at.LAYERS] + 8 * i * at.LAYER, at.LAYER)
    slots = table(layer[at.TABLE], TABLE_ROWS, layer[at.TABLE_COLUMNS])
    scores = carray(pointer(ahead[at.SCORES]), (layer[at.N_EXPERT],), np.float32)
    guesses = words(ahead[at.GUESSES], at.MOST_GUESSES)
    free = slots[NUMBER, N_FREE]
    most = min(ahead[at.MOST_AHEAD], free)
    guessed, brought = 0, 0
    for _ in range(layer[at.TOP_K]):
        best = -1
        for expert in range(layer[at.N_EXPERT]):
            if scores[expert] > -np.inf and (best < 0 or scores[expert] > scores[best]):
                best = expert
        if best < 0 or guessed == most:
            break
        scores[best] = -np.inf
        if slots[SLOT_OF, best] >= 0:
            continue
        if place_held(slots, best, free) < 0:
            for place in range(free):
                slot = slots[FREE, place]
                if not _is_guessed(ahead, guessed, slots[CONTENT, slot]):
                    slots[CONTENT, slot], slots[EARLY, slot] = best, 1
                    _fetch(root, ahead, i, layer, best, slot)
                    guesses[guessed] = guesses[brought]
                    guesses[brought] = best
                    brought += 1
                    break
        else:
            guesses[guessed] = best
        guessed += 1
    if brought > 0 and ahead[at.FETCHED_EVENT] != 0:
        call(root[at.EVENT_RECORD], ahead[at.FETCHED_EVENT], ahead[at.FETCH_BACKEND], 0, 0, 0)
    ahead[at.N_GUESSED], ahead[at.N_BROUGHT] = guessed, brought


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
            call(root[at.READ], ahead[at.AHEAD_FD], ahead[at.AHEAD_ROOM] + 8, 8, 0, 0)  # sleeps until something is written


@compiled
def look_ahead(user_data: int) -> None:
    """The thread: answer requests until it is asked to stop."""
    root = words(user_data, at.ROOT_SIZE)
    ahead, address = words(root[at.AHEAD], at.AHEAD_SIZE), _state(root)
    while True:
        state = _wait_for_request(root, ahead)
        if state == 0:
            return
        i = ahead[at.FOR_LAYER]
        graph = words(ahead[at.GUESS_GRAPHS], root[at.N_LAYERS])[i - 1]
        if ahead[at.INPUT_EVENT] != 0:
            call(root[at.EVENT_WAIT], ahead[at.GUESS_BACKEND], ahead[at.INPUT_EVENT], 0, 0, 0)
        status = call(root[at.GRAPH_COMPUTE], ahead[at.GUESS_BACKEND], graph, 0, 0, 0) & 0xFFFFFFFF
        if status != 0:
            store(root[at.AHEAD] + 8 * at.AHEAD_STATUS, status)
        # Taken back meanwhile, or asked anew: then these scores are for nothing, and its slots are not ours.
        if status == 0 and swap(address, state, state - at.REQUESTED + at.CLAIMED):
            bring(root, ahead, i)
            store(address, state - at.REQUESTED + at.DONE_AHEAD)
        elif status != 0:
            swap(address, state, state - at.REQUESTED + at.IDLE)
