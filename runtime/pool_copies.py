"""What the compiled callback copies, and what waits for it: host memory to the home, and within the home."""

from __future__ import annotations

from typing import Any

from bel.runtime import pool_rows as at
from bel.runtime.pool_counters import IN_PLACE, MOVED_BYTES, STAGED_BYTES, UPLOADED_BYTES
from bel.runtime.pool_step import DISTINCT, HELD, IS_EARLY, IS_HELD, LOAD, SLOT_OF, STOOD, TABLE_ROWS, TO
from bel.runtime.pool_words import call, compiled, table, words


@compiled
def put(root: Any, address: int, offset: int, size: int) -> None:
    """Begin to copy host memory to an offset of the home.  Two streams take turns: one alone leaves a gap behind each copy."""
    root[at.TURN] = 1 - root[at.TURN]
    call(root[at.SET_ASYNC], root[at.COPY_BACKEND + root[at.TURN]], root[at.HOME_TENSOR], address, offset, size)


@compiled
def follow(root: Any, event: int, backend: int, waiting: int) -> None:
    """Let the stream of one backend wait for what was begun on another one's."""
    call(root[at.EVENT_RECORD], event, backend, 0, 0, 0)
    call(root[at.EVENT_WAIT], waiting, event, 0, 0, 0)


@compiled
def gather(root: Any) -> None:
    """Let the first of the two streams for copies wait for the other one."""
    if root[at.OTHER_EVENT] != 0:
        follow(root, root[at.OTHER_EVENT], root[at.OTHER_BACKEND], root[at.COPY_BACKEND])
    else:
        call(root[at.SYNCHRONIZE], root[at.OTHER_BACKEND], 0, 0, 0, 0)


@compiled
def let_wait(root: Any) -> None:
    """What the graph computes next waits for all copies that were begun; here nothing waits, but for a home without events."""
    gather(root)
    if root[at.COPIED_EVENT] != 0:
        follow(root, root[at.COPIED_EVENT], root[at.COPY_BACKEND], root[at.GRAPH_BACKEND])
    else:
        call(root[at.SYNCHRONIZE], root[at.COPY_BACKEND], 0, 0, 0, 0)


@compiled
def let_follow_fetches(root: Any, waiting: int) -> None:
    """Let a backend's stream wait for what was brought ahead of its use."""
    event = words(root[at.AHEAD], at.AHEAD_SIZE)[at.FETCHED_EVENT]
    if event != 0:
        call(root[at.EVENT_WAIT], waiting, event, 0, 0, 0)


@compiled
def _move(root: Any, source: int, target: int, size: int) -> None:
    """Copy within the home, from offset to offset."""
    for which in range(2):
        tensor = root[at.SOURCE_TENSOR + which]
        ne, nb = words(tensor + root[at.AT_NE], 1), words(tensor + root[at.AT_NB], 4)
        ne[0], nb[1], nb[2], nb[3] = size, size, size, size
        words(tensor + root[at.AT_DATA], 1)[0] = root[at.HOME_BASE] + (target if which else source)
    backend = root[at.COPY_BACKEND]
    call(root[at.COPY_ASYNC], backend, backend, root[at.SOURCE_TENSOR], root[at.TARGET_TENSOR], 0)


@compiled
def put_biases(root: Any, i: int, layer: Any, expert: int, slot: int) -> None:
    biases = table(root[at.BIASES] + 8 * i * at.N_PARTS * at.BIAS, at.N_PARTS, at.BIAS)
    for b in range(layer[at.N_BIASES]):
        size = biases[b, at.BIAS_STRIDE]
        put(root, biases[b, at.BIAS_ROWS] + expert * size, biases[b, at.BIAS_SLOTS_AT] + slot * size, size)


@compiled
def point(root: Any, i: int, layer: Any, parts: Any, is_staged: bool) -> None:
    """Let the products of a layer read the stage or its slots."""
    for p in range(at.N_PARTS):
        offset = parts[p, at.STAGE_AT] if is_staged else parts[p, at.SLOTS_AT]
        words(parts[p, at.WEIGHT] + root[at.AT_DATA], 1)[0] = root[at.HOME_BASE] + offset
    biases = table(root[at.BIASES] + 8 * i * at.N_PARTS * at.BIAS, at.N_PARTS, at.BIAS)
    for b in range(layer[at.N_BIASES]):
        data = biases[b, at.BIAS_DATA] if is_staged else root[at.HOME_BASE] + biases[b, at.BIAS_SLOTS_AT]
        words(biases[b, at.BIAS_TENSOR] + root[at.AT_DATA], 1)[0] = data
    layer[at.IS_STAGED] = is_staged


@compiled
def host_address(layer: Any, parts: Any, p: int, expert: int) -> int:
    """Where a part of an expert stands in host memory."""
    index = words(layer[at.HOST_INDEX], layer[at.N_EXPERT])[expert]
    return int(parts[p, at.HOST_AT] + index * parts[p, at.HOST_STRIDE])


@compiled
def upload(root: Any, i: int, layer: Any, parts: Any, ask: Any, loads: int, counts: Any) -> int:
    """Begin to bring the experts of a call of one row into their slots.  Returns how many."""
    copies, follows = 0, False
    for n in range(loads):
        held = ask[HELD, n]
        if held & IS_HELD:
            counts[IN_PLACE] += 1
            follows = True
        else:
            copies += 1
            if held & IS_EARLY:  # a guess of something else may still be on its way to this slot
                let_follow_fetches(root, root[at.COPY_BACKEND])
                let_follow_fetches(root, root[at.OTHER_BACKEND])
    if follows:
        let_follow_fetches(root, root[at.GRAPH_BACKEND])
    for n in range(loads):
        if ask[HELD, n] & IS_HELD:
            continue
        expert, slot = ask[LOAD, n], ask[TO, n]
        for p in range(at.N_PARTS):
            size = parts[p, at.STRIDE]
            put(root, host_address(layer, parts, p, expert), parts[p, at.SLOTS_AT] + slot * size, size)
            counts[UPLOADED_BYTES] += size
        put_biases(root, i, layer, expert, slot)
    return copies


@compiled
def _put_on_stage(root: Any, layer: Any, parts: Any, expert: int, counts: Any) -> None:
    for p in range(at.N_PARTS):
        size = parts[p, at.STRIDE]
        put(root, host_address(layer, parts, p, expert), parts[p, at.STAGE_AT] + expert * size, size)
        counts[STAGED_BYTES] += size


@compiled
def begin_stage(root: Any, i: int, counts: Any) -> None:
    """Begin to bring all experts of layer i that have no slot to the stage, which no layer reads any more."""
    layer = words(root[at.LAYERS] + 8 * i * at.LAYER, at.LAYER)
    parts = table(root[at.PARTS] + 8 * i * at.N_PARTS * at.PART, at.N_PARTS, at.PART)
    slots = table(layer[at.TABLE], TABLE_ROWS, layer[at.TABLE_COLUMNS])
    for expert in range(layer[at.N_EXPERT]):
        if slots[SLOT_OF, expert] < 0:
            _put_on_stage(root, layer, parts, expert, counts)
    root[at.STAGE_BEGUN] = i


@compiled
def stage(root: Any, i: int, layer: Any, parts: Any, ask: Any, distinct: int, loads: int, begun: bool, counts: Any) -> None:
    """Bring the experts of a call of many rows to the stage, and from there those that are to stay into their slots.

    `begun`: those without a slot are on their way already.
    """
    for n in range(distinct):
        expert, slot = ask[DISTINCT, n], ask[STOOD, n]
        if slot < 0:
            if not begun:
                _put_on_stage(root, layer, parts, expert, counts)
            continue
        for p in range(at.N_PARTS):
            size = parts[p, at.STRIDE]
            _move(root, parts[p, at.SLOTS_AT] + slot * size, parts[p, at.STAGE_AT] + expert * size, size)
            counts[MOVED_BYTES] += size
    gather(root)
    for n in range(loads):
        expert, slot = ask[LOAD, n], ask[TO, n]
        if ask[HELD, n] & IS_HELD:
            continue
        if ask[HELD, n] & IS_EARLY:
            let_follow_fetches(root, root[at.COPY_BACKEND])
        for p in range(at.N_PARTS):
            size = parts[p, at.STRIDE]
            _move(root, parts[p, at.STAGE_AT] + expert * size, parts[p, at.SLOTS_AT] + slot * size, size)
            counts[MOVED_BYTES] += size
        put_biases(root, i, layer, expert, slot)
    let_wait(root)
