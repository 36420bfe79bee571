"""The compiled callback as a C function, and the thread beside it that computes missing experts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import numba
from numba.core import types

from bel.runtime import pool_rows as at
from bel.runtime.pool_ahead import look_ahead
from bel.runtime.pool_callback import handle
from bel.runtime.pool_words import call, compiled, load, now, store, words


@compiled
def work(user_data: int) -> None:
    """The CPU's thread: compute what is asked until it is asked to stop."""
    root = words(user_data, at.ROOT_SIZE)
    request = words(root[at.REQUEST], at.REQUEST_SIZE)
    room, clock = root[at.EVENT_ROOM] + 8, root[at.CLOCK_ROOM] + 16
    seen = 0
    while True:
        began = now(root, clock)
        while load(root[at.REQUEST] + 8 * at.ASKED) == seen:
            if load(root[at.REQUEST] + 8 * at.STOP) != 0:
                return
            if now(root, clock) - began < root[at.SPIN_NS]:
                call(root[at.YIELD], 0, 0, 0, 0, 0)
            else:
                call(root[at.READ], root[at.EVENT_FD], room, 8, 0, 0)  # sleeps until something is written
        seen = load(root[at.REQUEST] + 8 * at.ASKED)
        layer = words(root[at.LAYERS] + 8 * request[at.WHICH] * at.LAYER, at.LAYER)
        graph = words(layer[at.GRAPHS], layer[at.TOP_K])[request[at.HOW_MANY] - 1]
        status = call(root[at.GRAPH_COMPUTE], root[at.CPU_BACKEND], graph, 0, 0, 0) & 0xFFFFFFFF
        store(root[at.REQUEST] + 8 * at.STATUS, status)
        store(root[at.REQUEST] + 8 * at.DONE, seen)


def make_callback() -> Any:
    """`handle` as a C function; its `address` is good as long as it lives."""
    version = sources_version()

    def on_node(node: int, is_ask: int, user_data: int) -> int:
        return handle(node, is_ask, user_data) if version else 0

    signature = types.uint8(types.int64, types.uint8, types.int64)
    try:
        return numba.cfunc(signature, cache=True)(on_node)
    except RuntimeError:  # no place for the cache
        return numba.cfunc(signature)(on_node)


def make_worker() -> Callable[[int], None]:
    """`work`, compiled: the first request must not wait for the compiler."""
    version = sources_version()

    def wait_and_work(user_data: int) -> None:
        if version:
            work(user_data)

    return _thread_of(wait_and_work)


def make_looker() -> Callable[[int], None]:
    """`look_ahead`, likewise."""
    version = sources_version()

    def wait_and_look(user_data: int) -> None:
        if version:
            look_ahead(user_data)

    return _thread_of(wait_and_look)


def _thread_of(function: Callable[[int], None]) -> Callable[[int], None]:
    signature = types.void(types.int64)
    try:
        return cast(Callable[[int], None], numba.njit(signature, nogil=True, cache=True)(function))
    except RuntimeError:  # no place for the cache
        return cast(Callable[[int], None], numba.njit(signature, nogil=True)(function))


@cache
def sources_version() -> int:
    """A number of all that is compiled into the callback, for numba's cache: it looks at one file alone, and would go on with
    old machine code where another one changed.  What a function closes over is part of its key."""
    folder = Path(__file__).parent
    state = hashlib.sha256()
    others = [folder / "policies.py", folder / "guess_gate.py"]
    for path in sorted([*folder.glob("pool_*.py"), *folder.glob("cache_*.py"), *others]):
        state.update(path.read_bytes())
    return int.from_bytes(state.digest()[:7], "little") + 1
