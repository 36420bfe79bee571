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
from bel.runtime.pool_counters import (
    ABSENT as N_ABSENT,
)
from bel.runtime.pool_counters import (
    ACCESSES,
    CALLS,
    MISSED,
    MOVED_BYTES,
    N_COUNTS,
    STAGE_CALLS,
    STAGED_BYTES,
    UPLOADED_BYTES,
    WAIT_NS,
)
from bel.runtime.pool_step import (
    ABSENT,
    ASK_ROWS,
    DISTINCT,
    LOAD,
    RANK,
    ROW,
    STOOD,
    TABLE_ROWS,
    TO,
    plan_call,
)
from bel.runtime.pool_words import call, compiled, load, pointer, store, table, words

_TYPE_I32 = 26
_FNV_START, _FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)
_CLOCK_MONOTONIC = 1


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
def now(root: Any, room: int) -> int:
    """Nanoseconds of a clock that only goes forward.  Each thread has a room of 16 bytes of its own."""
    call(root[at.CLOCK_GETTIME], _CLOCK_MONOTONIC, room, 0, 0, 0)
    time = words(room, 2)
    return int(time[0] * 1000000000 + time[1])


@compiled
def _put(root: Any, address: int, offset: int, size: int) -> None:
    """Begin to copy host memory to an offset of the home.  Two streams take turns: one alone leaves a gap behind each copy."""
    root[at.TURN] = 1 - root[at.TURN]
    call(root[at.SET_ASYNC], root[at.COPY_BACKEND + root[at.TURN]], root[at.HOME_TENSOR], address, offset, size)


@compiled
def _arrive(root: Any) -> None:
    """Wait until all copies that were begun have arrived."""
    call(root[at.SYNCHRONIZE], root[at.COPY_BACKEND], 0, 0, 0, 0)
    call(root[at.SYNCHRONIZE], root[at.OTHER_BACKEND], 0, 0, 0, 0)


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
def _put_biases(root: Any, i: int, layer: Any, expert: int, slot: int) -> None:
    biases = table(root[at.BIASES] + 8 * i * at.N_PARTS * at.BIAS, at.N_PARTS, at.BIAS)
    for b in range(layer[at.N_BIASES]):
        size = biases[b, at.BIAS_STRIDE]
        _put(root, biases[b, at.BIAS_ROWS] + expert * size, biases[b, at.BIAS_SLOTS_AT] + slot * size, size)


@compiled
def _point(root: Any, i: int, layer: Any, parts: Any, is_staged: bool) -> None:
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
def _host(layer: Any, parts: Any, p: int, expert: int) -> int:
    """Where a part of an expert stands in host memory."""
    index = words(layer[at.HOST_INDEX], layer[at.N_EXPERT])[expert]
    return int(parts[p, at.HOST_AT] + index * parts[p, at.HOST_STRIDE])


@compiled
def _upload(root: Any, i: int, layer: Any, parts: Any, ask: Any, loads: int, counts: Any) -> None:
    for n in range(loads):
        expert, slot = ask[LOAD, n], ask[TO, n]
        for p in range(at.N_PARTS):
            size = parts[p, at.STRIDE]
            _put(root, _host(layer, parts, p, expert), parts[p, at.SLOTS_AT] + slot * size, size)
            counts[UPLOADED_BYTES] += size
        _put_biases(root, i, layer, expert, slot)


@compiled
def _stage(root: Any, i: int, layer: Any, parts: Any, ask: Any, distinct: int, loads: int, counts: Any) -> None:
    for n in range(distinct):
        expert, slot = ask[DISTINCT, n], ask[STOOD, n]
        for p in range(at.N_PARTS):
            size = parts[p, at.STRIDE]
            target = parts[p, at.STAGE_AT] + expert * size
            if slot >= 0:
                _move(root, parts[p, at.SLOTS_AT] + slot * size, target, size)
                counts[MOVED_BYTES] += size
            else:
                _put(root, _host(layer, parts, p, expert), target, size)
                counts[STAGED_BYTES] += size
    _arrive(root)
    for n in range(loads):
        expert, slot = ask[LOAD, n], ask[TO, n]
        for p in range(at.N_PARTS):
            size = parts[p, at.STRIDE]
            _move(root, parts[p, at.STAGE_AT] + expert * size, parts[p, at.SLOTS_AT] + slot * size, size)
            counts[MOVED_BYTES] += size
        _put_biases(root, i, layer, expert, slot)


@compiled
def _fail(root: Any, error: int, i: int, value: int) -> int:
    root[at.ERROR], root[at.ERROR_LAYER], root[at.ERROR_VALUE] = error, i, value
    return 0


@compiled
def _request(root: Any, i: int, layer: Any, ask: Any, absent: int) -> None:
    """Have the CPU's thread compute the absent experts."""
    call(root[at.TENSOR_GET], layer[at.INPUT_NODE], root[at.CPU_INPUT], 0, layer[at.ROW_BYTES], 0)
    blobs = carray(pointer(root[at.CPU_BLOBS]), (absent,), np.int32)
    experts = carray(pointer(root[at.CPU_EXPERTS]), (absent,), np.int32)
    index = words(layer[at.HOST_INDEX], layer[at.N_EXPERT])
    for n in range(absent):
        blobs[n], experts[n] = index[ask[ABSENT, n]], ask[ABSENT, n]
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
    call(root[at.TENSOR_GET], node, root[at.IDS], 0, size, 0)
    ids = carray(pointer(root[at.IDS]), (size // 4,), np.int32)
    short = carray(pointer(root[at.SHORT]), (rows, top_k), np.uint16)
    for row in range(rows):
        for rank in range(top_k):
            expert = ids[row * step + rank]
            if expert < 0 or expert >= n_expert:
                return _fail(root, at.WRONG_IDS, i, expert)
            short[row, rank] = expert
    ints = table(layer[at.INTS], INT_ROWS, layer[at.COLUMNS])
    reals = carray(pointer(layer[at.REALS]), (REAL_ROWS, layer[at.COLUMNS]), np.float64)
    slots = table(layer[at.TABLE], TABLE_ROWS, layer[at.TABLE_COLUMNS])
    ask = table(layer[at.ASK], ASK_ROWS, n_expert)
    room = carray(pointer(layer[at.ROW_ROOM]), (top_k,), np.uint16)
    share = carray(pointer(root[at.SHARE]), (1,), np.float64)[0]
    distinct, missed, loads, absent = plan_call(ints, reals, slots, ask, short, room, root[at.MODE], share)
    counts = table(root[at.COUNTS], 2, N_COUNTS)[words(root[at.PHASE], 1)[0]]
    counts[CALLS] += 1
    counts[ACCESSES] += distinct
    counts[MISSED] += missed
    counts[N_ABSENT] += absent
    layer[at.ABSENT_NOW] = absent
    if absent > 0:  # first, so that the CPU works while the rest is done
        _request(root, i, layer, ask, absent)
    parts = table(root[at.PARTS] + 8 * i * at.N_PARTS * at.PART, at.N_PARTS, at.PART)
    is_staged = rows > 1
    if is_staged != (layer[at.IS_STAGED] != 0):
        _point(root, i, layer, parts, is_staged)
    if is_staged:
        counts[STAGE_CALLS] += 1
        _stage(root, i, layer, parts, ask, distinct, loads, counts)
    else:
        _upload(root, i, layer, parts, ask, loads, counts)
        for rank in range(top_k):
            ids[rank] = ask[ROW, rank]
        call(root[at.SET_ASYNC], root[at.COPY_BACKEND], node, root[at.IDS], 0, size)
    _arrive(root)
    return 1


@compiled
def _wait_for_cpu(root: Any) -> int:
    """Wait until the CPU's thread is done with what it was asked; its status."""
    request = root[at.REQUEST]
    wanted = load(request + 8 * at.ASKED)
    if load(request + 8 * at.DONE) != wanted:
        while load(request + 8 * at.DONE) != wanted:
            call(root[at.YIELD], 0, 0, 0, 0, 0)
    return int(load(request + 8 * at.STATUS))


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
        call(root[at.SET_ASYNC], root[at.COPY_BACKEND], output, layer[at.CPU_ROWS] + n * size, ask[RANK, n] * step, size)
    call(root[at.SYNCHRONIZE], root[at.COPY_BACKEND], 0, 0, 0, 0)
    return 1


@compiled
def handle(node: int, is_ask: int, user_data: int) -> int:
    """A `ggml_backend_sched_eval_callback` in numbers."""
    root = words(user_data, at.ROOT_SIZE)
    if root[at.ERROR] != at.NO_ERROR:
        return is_ask  # stop at this node and leave the graph
    name = carray(pointer(node + root[at.AT_NAME]), (at.NAME_CAPACITY,), np.uint8)
    found = find_name(root, name)
    if found < 0:
        return 1 - is_ask
    what, i = found & 3, found >> 2
    layer = words(root[at.LAYERS] + 8 * i * at.LAYER, at.LAYER)
    if is_ask:
        if what == at.TOPK_NAME:
            layer[at.TOPK_NODE] = node
        elif what == at.INPUT_NAME:
            layer[at.INPUT_NODE] = node
        elif what == at.ROUTER_NAME:
            return 1
        else:
            return 1 if root[at.HAS_CPU] != 0 and words(node + root[at.AT_NE], 4)[2] == 1 else 0
        return 0
    return _serve(root, i, layer) if what == at.ROUTER_NAME else _add_rows(root, i, layer, node)
