"""The choice of a single row's experts, from the home's own writing of it to the numbers of slots that take its place.

The home writes the ids to host memory by itself, and there they are seen at once: llama.cpp need not wait until all of the
graph's stream is done, as it does behind each stop.  It would call the backend's `synchronize`
(`ggml_backend_sched_compute_splits` in ggml/src/ggml-backend.cpp of llama.cpp build 11549), and a backend without that function
is not waited for (`ggml_backend_synchronize` there).  What is begun behind the stop comes later in the same stream, or has
nothing to do with what is not done yet.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from bel.runtime import pool_rows as at
from bel.runtime.pool_step import ROW
from bel.runtime.pool_words import call, compiled, load, now, pointer, words

_NOT_YET, _UNWRITTEN = -1, 0x80000000
_TRIES, _MOST_NS = 256, 5_000_000


@compiled
def hold(root: Any) -> None:
    """Let llama.cpp not wait for the graph's stream at the stop that comes next."""
    if root[at.WAIT_AT] != 0:
        words(root[at.WAIT_AT], 1)[0] = 0
        root[at.IS_HELD] = 1


@compiled
def let_go(root: Any) -> None:
    """From now on it waits again."""
    if root[at.IS_HELD] != 0:
        words(root[at.WAIT_AT], 1)[0] = root[at.WAIT_FUNCTION]
        root[at.IS_HELD] = 0


@compiled
def _picked(root: Any, i: int) -> int:
    """Where the home writes the choice of layer i: kernels behind that read it there too, while the next layer is asked for."""
    return int(root[at.PICKED] + i * root[at.PICKED_BYTES])


@compiled
def _point_ids(root: Any, node: int, address: int) -> None:
    """Move the ids of a choice, and what they are a view of, to an address."""
    source = words(node + root[at.AT_VIEW_SRC], 1)[0]
    if source != 0:
        words(source + root[at.AT_DATA], 1)[0] = address - words(node + root[at.AT_VIEW_OFFS], 1)[0]
    words(node + root[at.AT_DATA], 1)[0] = address


@compiled
def pick(root: Any, i: int, layer: Any, node: int) -> None:
    """Before a layer chooses: the home writes a single row's choice to host memory itself, and nothing need be fetched."""
    layer[at.TOPK_NODE], layer[at.IS_PICKED] = node, 0
    if root[at.PICKED] == 0 or words(node + root[at.AT_NE], 4)[1] != 1:
        return
    data = words(node + root[at.AT_DATA], 1)[0]
    if data != _picked(root, i):
        layer[at.IDS_DATA] = data
    _point_ids(root, node, _picked(root, i))
    layer[at.IS_PICKED] = 1
    top_k = layer[at.TOP_K]
    words(_picked(root, i), (top_k + 1) // 2)[:] = _NOT_YET
    if top_k % 2 != 0:  # the other half of the last word
        carray(pointer(_picked(root, i)), (top_k + 1,), np.int32)[top_k] = 0


@compiled
def is_seen(layer: Any) -> bool:
    """Whether the ids can be waited for: the kernels that sort no more than so many experts write each id once."""
    return bool(layer[at.IS_PICKED] != 0 and layer[at.N_EXPERT] <= at.MOST_SORTED)


@compiled
def wait_for_choice(root: Any, i: int, layer: Any) -> None:
    """Wait until all ids of a layer's choice are written; where they do not come, for the graph's stream."""
    began = now(root, root[at.CLOCK_ROOM])
    for n in range((layer[at.TOP_K] + 1) // 2):
        tries = 0
        while True:
            both = load(_picked(root, i) + 8 * n)
            if both >= 0 and both & _UNWRITTEN == 0:
                break
            tries += 1
            if tries % _TRIES == 0:
                call(root[at.YIELD], 0, 0, 0, 0, 0)
                if now(root, root[at.CLOCK_ROOM]) - began > _MOST_NS:
                    call(root[at.SYNCHRONIZE], root[at.GRAPH_BACKEND], 0, 0, 0, 0)
                    return


@compiled
def read_ids(root: Any, i: int, layer: Any, node: int, size: int) -> int:
    """The address of the ids of a layer's choice in host memory."""
    if layer[at.IS_PICKED] == 0:
        call(root[at.TENSOR_GET], node, root[at.IDS], 0, size, 0)
        return int(root[at.IDS])
    layer[at.IS_PICKED] = 0
    _point_ids(root, node, layer[at.IDS_DATA])
    return _picked(root, i)


@compiled
def name_slots(root: Any, i: int, node: int, top_k: int, ask: Any) -> None:
    """Put the slots of a single row in the place of its ids, before the graph goes on."""
    address = root[at.NAMED] + i * at.NAMED_BYTES
    named = carray(pointer(address), (top_k,), np.int32)
    for rank in range(top_k):
        named[rank] = ask[ROW, rank]
    call(root[at.SET_ASYNC], root[at.GRAPH_BACKEND], node, address, 0, 4 * top_k)
