"""The stops of a graph in compiled code: what `pool_observer.py` does, at a hundredth of its cost.

llama.cpp calls it for each node, so nothing here may raise or need the interpreter.  All state is in arrays
(`pool_rows.py`), all of ggml is called by address.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from bel.runtime import pool_rows as at
from bel.runtime.cache_rows import INT_ROWS, REAL_ROWS
from bel.runtime.pool_ahead import request, settle
from bel.runtime.pool_choice import hold, is_seen, let_go, name_slots, pick, read_ids, wait_for_choice
from bel.runtime.pool_copies import begin_stage, leave_stage, let_wait, point, stage, upload
from bel.runtime.pool_counters import (
    ABSENT as N_ABSENT,
)
from bel.runtime.pool_counters import (
    ACCESSES,
    CALLS,
    MISSED,
    N_COUNTS,
    STAGE_CALLS,
    WAIT_NS,
)
from bel.runtime.pool_step import ABSENT, AHEAD, ASK_ROWS, RANK, TABLE_ROWS, plan_call, uses_nearly_all
from bel.runtime.pool_words import call, compiled, load, now, pointer, store, table, words

_TYPE_I32 = 26
_FNV_START, _FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)


@compiled
def find_name(root: Any, name: Any) -> int:
    """What a node's name stands for, as `what + 4 * layer`, or -1.  `name` uint8, ended by a zero."""
    key = _FNV_START
    length = 0
    while length < at.NAME_CAPACITY and name[length] != 0:
        key = (key ^ np.uint64(name[length])) * _FNV_PRIME
        length += 1
    size = root[at.NAME_SIZE]
    keys, values = words(root[at.NAME_KEYS], size), words(root[at.NAME_VALUES], size)
    place = np.int64(key & np.uint64(size - 1))
    while values[place] >= 0:
        if keys[place] == np.int64(key):
            known = carray(pointer(root[at.NAME_BYTES] + at.NAME_CAPACITY * place), (at.NAME_CAPACITY,), np.uint8)
            same = True
            for i in range(length):
                same = same and known[i] == name[i]
            if same and (length == at.NAME_CAPACITY or known[length] == 0):
                return int(values[place])
        place = (place + 1) & (size - 1)
    return -1


@compiled
def _fail(root: Any, error: int, i: int, value: int) -> int:
    root[at.ERROR], root[at.ERROR_LAYER], root[at.ERROR_VALUE] = error, i, value
    call(root[at.SYNCHRONIZE], root[at.GRAPH_BACKEND], 0, 0, 0, 0)  # nobody may have waited for it
    return 0


@compiled
def _wait_for_cpu(root: Any) -> int:
    """Wait until the CPU's thread is done with what it was asked; its status."""
    request = root[at.REQUEST]
    wanted = load(request + 8 * at.ASKED)
    while load(request + 8 * at.DONE) != wanted:
        call(root[at.YIELD], 0, 0, 0, 0, 0)
    return int(load(request + 8 * at.STATUS))


@compiled
def _request(root: Any, i: int, layer: Any, ask: Any, absent: int) -> None:
    """Have the CPU's thread compute the absent experts."""
    _wait_for_cpu(root)  # for what a decode that failed had asked
    call(root[at.TENSOR_GET], layer[at.INPUT_NODE], root[at.CPU_INPUT], 0, layer[at.ROW_BYTES], 0)
    experts = carray(pointer(root[at.CPU_EXPERTS]), (absent,), np.int32)
    for n in range(absent):
        experts[n] = ask[ABSENT, n]
    request = words(root[at.REQUEST], at.REQUEST_SIZE)
    request[at.WHICH], request[at.HOW_MANY] = i, absent
    store(root[at.REQUEST] + 8 * at.ASKED, request[at.ASKED] + 1)
    words(root[at.EVENT_ROOM], 2)[0] = 1
    call(root[at.WRITE], root[at.EVENT_FD], root[at.EVENT_ROOM], 8, 0, 0)


@compiled
def _serve(root: Any, i: int, layer: Any) -> int:
    """Behind the choice of a layer's experts: bring them, and put slots in the place of the ids.  Returns 0 for an error."""
    layer[at.SERVED] = 1
    node, top_k, n_expert = layer[at.TOPK_NODE], layer[at.TOP_K], layer[at.N_EXPERT]
    ne, nb = words(node + root[at.AT_NE], 4), words(node + root[at.AT_NB], 4)
    rows, step = ne[1], nb[1] // 4
    if rows == 0:
        return 1
    size = (rows - 1) * nb[1] + 4 * top_k
    kind = carray(pointer(node + root[at.AT_TYPE]), (1,), np.int32)[0]
    if size > root[at.IDS_BYTES] or ne[0] != top_k or kind != _TYPE_I32 or nb[0] != 4:
        return _fail(root, at.TOO_MANY_IDS, i, rows)
    ids = carray(pointer(read_ids(root, i, layer, node, size)), (size // 4,), np.int32)
    short = carray(pointer(root[at.SHORT]), (rows, top_k), np.uint16)
    for row in range(rows):
        for rank in range(top_k):
            expert = ids[row * step + rank]
            if expert < 0 or expert >= n_expert:
                return _fail(root, at.WRONG_IDS, i, expert)
            short[row, rank] = expert
    counts = table(root[at.COUNTS], 2, N_COUNTS)[words(root[at.PHASE], 1)[0]]
    parts = table(root[at.PARTS] + 8 * i * at.N_PARTS * at.PART, at.N_PARTS, at.PART)
    slots = table(layer[at.TABLE], TABLE_ROWS, layer[at.TABLE_COLUMNS])
    brought = settle(root, i, slots, short, counts)
    ints = table(layer[at.INTS], INT_ROWS, layer[at.COLUMNS])
    reals = carray(pointer(layer[at.REALS]), (REAL_ROWS, layer[at.COLUMNS]), np.float64)
    ask = table(layer[at.ASK], ASK_ROWS, n_expert)
    room = carray(pointer(layer[at.ROW_ROOM]), (top_k,), np.uint16)
    share = carray(pointer(root[at.SHARE]), (1,), np.float64)[0]
    distinct, missed, loads, absent = plan_call(ints, reals, slots, ask, short, room, root[at.MODE], share)
    counts[CALLS] += 1
    counts[ACCESSES] += distinct
    counts[MISSED] += missed
    counts[N_ABSENT] += absent
    layer[at.ABSENT_NOW], layer[at.DISTINCT_NOW] = absent, distinct
    if absent > 0:  # first, so that the CPU works while the rest is done
        _request(root, i, layer, ask, absent)
    is_staged = rows > 1
    begun = is_staged and root[at.STAGE_BEGUN] == i
    if root[at.STAGE_BEGUN] >= 0 and not begun:
        leave_stage(root)
    root[at.STAGE_BEGUN] = -1
    if is_staged != (layer[at.IS_STAGED] != 0):
        point(root, i, layer, parts, is_staged)
    if is_staged:
        counts[STAGE_CALLS] += 1
        stage(root, i, layer, parts, ask, distinct, loads, begun, counts)
    else:
        begun_copies = upload(root, i, layer, parts, ask, loads, counts)
        name_slots(root, i, node, top_k, ask)
        if begun_copies > 0:
            let_wait(root)
        request(root, i, layer)
        if brought > 0:
            slots[AHEAD, :] = 0
    return 1


@compiled
def _add_rows(root: Any, i: int, layer: Any, output: int) -> int:
    """Behind the products: write the rows that the CPU computed over those of the slots that stood in for them."""
    absent = layer[at.ABSENT_NOW]
    layer[at.ABSENT_NOW] = 0
    if absent == 0:
        return 1
    began = now(root, root[at.CLOCK_ROOM])
    status = _wait_for_cpu(root)
    counts = table(root[at.COUNTS], 2, N_COUNTS)[words(root[at.PHASE], 1)[0]]
    counts[WAIT_NS] += now(root, root[at.CLOCK_ROOM]) - began
    if status != 0:
        return _fail(root, at.CPU_FAILED, i, status)
    ask = table(layer[at.ASK], ASK_ROWS, layer[at.N_EXPERT])
    step, size = words(output + root[at.AT_NB], 4)[1], layer[at.ROW_BYTES]
    for n in range(absent):
        call(root[at.SET_ASYNC], root[at.GRAPH_BACKEND], output, layer[at.CPU_ROWS] + n * size, ask[RANK, n] * step, size)
    return 1


@compiled
def _stops_behind(root: Any, i: int, layer: Any, rows: int) -> int:
    """Whether to stop behind the products of a layer: for rows of the CPU's, or to fill the next layer's stage early.

    That of the last layer is not: of a prompt it computes the last token alone, and the others' experts would come in vain.
    """
    if rows == 1:
        if root[at.HAS_CPU] == 0:
            return 0
        hold(root)  # rows are written behind the products, in the graph's stream
        return 1
    return 1 if i + 2 < root[at.N_LAYERS] and uses_nearly_all(layer[at.DISTINCT_NOW], layer[at.N_EXPERT]) else 0


@compiled
def _leave(root: Any, i: int, layer: Any, output: int) -> int:
    """Behind the products of a layer, `output`.  Returns 0 for an error."""
    if words(output + root[at.AT_NE], 4)[2] == 1:
        return _add_rows(root, i, layer, output)
    begin_stage(root, i + 1, table(root[at.COUNTS], 2, N_COUNTS)[words(root[at.PHASE], 1)[0]])
    return 1


@compiled
def handle(node: int, is_ask: int, user_data: int) -> int:
    """A `ggml_backend_sched_eval_callback` in numbers."""
    root = words(user_data, at.ROOT_SIZE)
    let_go(root)
    if root[at.ERROR] != at.NO_ERROR:
        return is_ask  # stop at this node and leave the graph
    name = carray(pointer(node + root[at.AT_NAME]), (at.NAME_CAPACITY,), np.uint8)
    if root[at.FIRST_WORDS] != 0:
        firsts, first = words(root[at.FIRST_WORDS], at.MOST_WORDS), words(node + root[at.AT_NAME], 1)[0]
        is_other = True
        for n in range(at.MOST_WORDS):
            is_other = is_other and firsts[n] != first
        if is_other:
            return 1 - is_ask
    found = find_name(root, name)
    if found < 0:
        return 1 - is_ask
    what, i = found & 3, found >> 2
    layer = words(root[at.LAYERS] + 8 * i * at.LAYER, at.LAYER)
    if is_ask:
        if what == at.TOPK_NAME:
            pick(root, i, layer, node)
        elif what == at.INPUT_NAME:
            layer[at.INPUT_NODE] = node
        elif what == at.ROUTER_NAME:
            if is_seen(layer):
                hold(root)
            return 1
        else:
            return _stops_behind(root, i, layer, words(node + root[at.AT_NE], 4)[2])
        return 0
    if what != at.ROUTER_NAME:
        return _leave(root, i, layer, node)
    if is_seen(layer):
        wait_for_choice(root, i, layer)
    return _serve(root, i, layer)
