"""What the compiled callback copies, and what waits for it: host memory to the home, and within the home."""

from __future__ import annotations

from typing import Any

from bel.runtime import pool_rows as at
from bel.runtime.pool_counters import IN_TIME, MOVED_BYTES, STAGED_BYTES, UPLOADED_BYTES
from bel.runtime.pool_step import AHEAD, DISTINCT, LOAD, SLOT_OF, STOOD, TABLE_ROWS, TO
from bel.runtime.pool_words import call, call_8, compiled, table, words


@compiled
def next_stream(root: Any) -> int:
    """Two streams take turns for the stage: copies within the home go on beside those from host memory."""
    root[at.TURN] = 1 - root[at.TURN]
    root[at.IN_USE] |= root[at.TURN]
    return int(root[at.COPY_BACKEND + root[at.TURN]])


@compiled
def put(root: Any, address: int, offset: int, size: int) -> None:
    """Begin to copy host memory to an offset of the home."""
    call(root[at.SET_ASYNC], root[at.COPY_BACKEND], root[at.HOME_TENSOR], address, offset, size)


@compiled
def host_address(parts: Any, p: int, expert: int) -> int:
    """Where a part of an expert stands in host memory."""
    return int(parts[p, at.HOST_AT] + expert * parts[p, at.HOST_STRIDE])


@compiled
def put_experts(root: Any, backend: int, layer: Any, parts: Any, expert: int, count: int, where: int, place: int) -> int:
    """Begin to copy `count` experts, side by side in host memory from `expert` on, to the places from `place` on of the slots
    or of the stage: `where` is the column of their offsets.  Returns the bytes.

    Parts of one size that stand evenly apart here and there are one copy of so many rows.
    """
    n_even = layer[at.N_EVEN]
    total = 0
    for p in range(at.N_PARTS):
        size = parts[p, at.STRIDE]
        address, offset = host_address(parts, p, expert), parts[p, where] + place * size
        total += count * size
        if p == 0 and n_even > 1:
            apart, host_apart = parts[1, where] - parts[0, where], parts[1, at.HOST_AT] - parts[0, at.HOST_AT]
            function, home = root[at.SET_2D_ASYNC], root[at.HOME_TENSOR]
            call_8(function, backend, home, address, offset, count * size, n_even, apart, host_apart)
        elif p >= n_even:
            call(root[at.SET_ASYNC], backend, root[at.HOME_TENSOR], address, offset, count * size)
    return total


@compiled
def follow(root: Any, event: int, backend: int, waiting: int) -> None:
    """Let the stream of one backend wait for what was begun on another one's; without events wait here."""
    if event == 0:
        call(root[at.SYNCHRONIZE], backend, 0, 0, 0, 0)
        return
    call(root[at.EVENT_RECORD], event, backend, 0, 0, 0)
    call(root[at.EVENT_WAIT], waiting, event, 0, 0, 0)


@compiled
def gather(root: Any) -> None:
    """Let the first of the two streams for copies wait for the other one, where that has something to do."""
    if root[at.IN_USE] == 0:
        return
    root[at.IN_USE] = 0
    follow(root, root[at.OTHER_EVENT], root[at.OTHER_BACKEND], root[at.COPY_BACKEND])


@compiled
def let_wait(root: Any) -> None:
    """What the graph computes next waits for all copies that were begun."""
    gather(root)
    follow(root, root[at.COPIED_EVENT], root[at.COPY_BACKEND], root[at.GRAPH_BACKEND])


@compiled
def let_follow_fetch(root: Any, waiting: int, number: int) -> None:
    """Let a backend's stream wait for the expert that was brought ahead as the `number`th of its layer, from 0."""
    event = words(words(root[at.AHEAD], at.AHEAD_SIZE)[at.FETCHED_EVENTS], at.MOST_GUESSES)[number]
    if event != 0:
        call(root[at.EVENT_WAIT], waiting, event, 0, 0, 0)


@compiled
def _move(root: Any, backend: int, source: int, target: int, size: int) -> None:
    """Begin to copy within the home, from offset to offset."""
    for which in range(2):
        tensor = root[at.SOURCE_TENSOR + which]
        ne, nb = words(tensor + root[at.AT_NE], 1), words(tensor + root[at.AT_NB], 4)
        ne[0], nb[1], nb[2], nb[3] = size, size, size, size
        words(tensor + root[at.AT_DATA], 1)[0] = root[at.HOME_BASE] + (target if which else source)
    call(root[at.COPY_ASYNC], backend, backend, root[at.SOURCE_TENSOR], root[at.TARGET_TENSOR], 0)


@compiled
def put_biases(root: Any, i: int, layer: Any, expert: int, slot: int) -> None:
    """Begin to copy an expert's biases into a slot."""
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
def _keep(root: Any, backend: int, i: int, layer: Any, parts: Any, expert: int, slot: int, counts: Any) -> None:
    """Copy an expert from the stage into a slot, its biases from host memory."""
    for p in range(at.N_PARTS):
        size = parts[p, at.STRIDE]
        source = parts[p, at.STAGE_AT] + expert * size
        _move(root, backend, source, parts[p, at.SLOTS_AT] + slot * size, size)
        counts[MOVED_BYTES] += size
    put_biases(root, i, layer, expert, slot)


@compiled
def upload(root: Any, i: int, layer: Any, parts: Any, ask: Any, loads: int, counts: Any) -> int:
    """Begin to bring the experts of a call of one row into their slots, those that were brought ahead from the stage.

    Those from host memory come one behind the other in one stream, and the graph waits for one event.  Those from the stage are
    copied in the graph's own stream, which need not wait for another one then.  Returns how many copies were begun for which
    it has to.
    """
    slots = table(layer[at.TABLE], TABLE_ROWS, layer[at.TABLE_COLUMNS])
    last, begun = 0, 0
    for n in range(loads):
        expert, slot = ask[LOAD, n], ask[TO, n]
        if slots[AHEAD, expert] != 0:
            last = max(last, slots[AHEAD, expert])
            continue
        counts[UPLOADED_BYTES] += put_experts(root, root[at.COPY_BACKEND], layer, parts, expert, 1, at.SLOTS_AT, slot)
        put_biases(root, i, layer, expert, slot)
        begun += 1
    if last == 0:
        return begun
    backend = root[at.GRAPH_BACKEND]
    let_follow_fetch(root, backend, last - 1)  # they came one behind the other
    for n in range(loads):
        if slots[AHEAD, ask[LOAD, n]] != 0:
            counts[IN_TIME] += 1
            _keep(root, backend, i, layer, parts, ask[LOAD, n], ask[TO, n], counts)
            begun += layer[at.N_BIASES]
    if root[at.KEPT_EVENT] != 0:
        call(root[at.EVENT_RECORD], root[at.KEPT_EVENT], backend, 0, 0, 0)
    else:
        call(root[at.SYNCHRONIZE], backend, 0, 0, 0, 0)
    return begun


@compiled
def _put_on_stage(root: Any, layer: Any, parts: Any, first: int, count: int, counts: Any) -> None:
    """Begin to bring `count` experts from `first` on to the stage, where they stand side by side as in host memory."""
    if count == 0:
        return
    counts[STAGED_BYTES] += put_experts(root, next_stream(root), layer, parts, first, count, at.STAGE_AT, first)


@compiled
def _follow_fetches(root: Any) -> None:
    """What was brought ahead to the stage comes before what is brought there now."""
    for number in range(words(root[at.AHEAD], at.AHEAD_SIZE)[at.MOST_AHEAD]):
        let_follow_fetch(root, root[at.COPY_BACKEND], number)
        let_follow_fetch(root, root[at.OTHER_BACKEND], number)


@compiled
def begin_stage(root: Any, i: int, counts: Any) -> None:
    """Begin to bring all experts of layer i that have no slot to the stage, which no layer reads any more."""
    layer = words(root[at.LAYERS] + 8 * i * at.LAYER, at.LAYER)
    parts = table(root[at.PARTS] + 8 * i * at.N_PARTS * at.PART, at.N_PARTS, at.PART)
    slots = table(layer[at.TABLE], TABLE_ROWS, layer[at.TABLE_COLUMNS])
    _follow_fetches(root)
    first = 0
    for expert in range(layer[at.N_EXPERT]):
        if slots[SLOT_OF, expert] >= 0:
            _put_on_stage(root, layer, parts, first, expert - first, counts)
            first = expert + 1
    _put_on_stage(root, layer, parts, first, layer[at.N_EXPERT] - first, counts)
    root[at.STAGE_BEGUN] = i


@compiled
def leave_stage(root: Any) -> None:
    """A stage was begun that no call of many rows came for: whatever is brought there next comes behind it."""
    gather(root)  # what is brought ahead waits for the same event
    follow(root, root[at.COPIED_EVENT], root[at.COPY_BACKEND], root[at.OTHER_BACKEND])


@compiled
def stage(root: Any, i: int, layer: Any, parts: Any, ask: Any, distinct: int, loads: int, begun: bool, counts: Any) -> None:
    """Bring the experts of a call of many rows to the stage, and from there those that are to stay into their slots.

    `begun`: those without a slot are on their way already.
    """
    if not begun:
        _follow_fetches(root)
    for n in range(distinct):
        expert, slot = ask[DISTINCT, n], ask[STOOD, n]
        if slot < 0:
            if not begun:
                _put_on_stage(root, layer, parts, expert, 1, counts)
            continue
        for p in range(at.N_PARTS):
            size = parts[p, at.STRIDE]
            _move(root, next_stream(root), parts[p, at.SLOTS_AT] + slot * size, parts[p, at.STAGE_AT] + expert * size, size)
            counts[MOVED_BYTES] += size
    gather(root)
    for n in range(loads):
        _keep(root, root[at.COPY_BACKEND], i, layer, parts, ask[LOAD, n], ask[TO, n], counts)
    let_wait(root)
