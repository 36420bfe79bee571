"""The thread that brings likely experts ahead of their use, and the tables that it shares with the callback."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import numpy as np

from bel.formats.errors import MachineError
from bel.runtime import pool_rows as at
from bel.runtime.cache_rows import Ints
from bel.runtime.guess_gate import make_gate
from bel.runtime.pool_guess import GuessGraphs
from bel.runtime.pool_home import Home
from bel.runtime.pool_thread import CompiledThread

_REST_SECONDS = 0.00002


class Looker:
    """`table` is what `pool_ahead.py` works on; without `graphs` nothing is guessed, and there is no thread.

    `room` is for the thread's clock, `events` whether the home's streams can wait for each other.  Close it before the graphs.
    """

    def __init__(self, home: Home, graphs: GuessGraphs | None, scores: int) -> None:
        self._abi = home.abi
        self.table: Ints = np.zeros(at.AHEAD_SIZE, np.int64)
        self._gate, self._guesses, self._room = make_gate(), np.zeros(at.MOST_GUESSES, np.int64), np.zeros(4, np.int64)
        self._events: list[int] = []
        self._thread: CompiledThread | None = None
        self._fetched = np.zeros(at.MOST_GUESSES, np.int64)
        table = self.table
        table[at.FETCHED_EVENTS] = self._fetched.ctypes.data
        table[at.GATE], table[at.GUESSES] = self._gate.ctypes.data, self._guesses.ctypes.data
        self._graphs: Ints = np.zeros(0, np.int64)
        if graphs is None:
            return
        self._graphs = np.array(graphs.graphs, np.int64)
        table[at.GUESS_GRAPHS], table[at.SCORES] = self._graphs.ctypes.data, scores
        table[at.GUESS_BACKEND], table[at.FETCH_BACKEND] = graphs.backend, graphs.fetches
        self._inputs = np.array(graphs.inputs, np.int64)
        table[at.INPUT_TENSORS] = self._inputs.ctypes.data
        self._fetched[:] = [self._event(home) for _ in range(at.MOST_GUESSES)]
        table[at.AHEAD_ROOM], table[at.AHEAD_CLOCK] = self._room.ctypes.data, self._room.ctypes.data + 16

    def _event(self, home: Home) -> int:
        event = new_event(home)
        if event:
            self._events.append(event)
        return event

    def start(self, root: Ints) -> None:
        """Begin to answer requests of the callback with these tables."""
        if not self._graphs.any():
            return
        self._thread = CompiledThread("bel-looks-ahead", self.table, at.AHEAD_STOP)
        self.table[at.AHEAD_FD] = self._thread.descriptor
        self._thread.start(_looker(), root)

    def use(self, most: int) -> None:
        """From now on bring at most so many experts of a layer ahead; between decodes.  Nothing is under way behind it."""
        self.rest()
        if self._thread is not None:  # no one would wait for more of them than `most`
            self._abi.lib.ggml_backend_synchronize(self._abi.pointer(int(self.table[at.FETCH_BACKEND])))
        self._gate[:] = 0
        self.table[at.MOST_AHEAD] = min(most, at.MOST_GUESSES) if self._thread is not None else 0

    def rest(self) -> None:
        """Wait until it reads nothing of a graph any more.  To be called before what a context holds may be freed: behind each
        decode, and when a context ends, for one that failed leaves a request."""
        table = self.table
        while self._thread is not None and (table[at.STATE] % at.N_STATES in (at.REQUESTED, at.CLAIMED) or table[at.IS_BUSY]):
            if self.table[at.IS_ASLEEP]:  # it fell asleep just when the last request was made
                self._thread.wake()
            time.sleep(_REST_SECONDS)

    def check(self) -> None:
        """Raise MachineError where a guess could not be computed."""
        status, self.table[at.AHEAD_STATUS] = int(self.table[at.AHEAD_STATUS]), 0
        if status:
            raise MachineError("llama.cpp could not compute a guess of the next layer's experts", found=f"status {status}")

    def close(self) -> None:
        """End the thread.  A second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()
        events, self._events = self._events, []
        for event in events:
            self._abi.lib.ggml_backend_event_free(self._abi.pointer(event))


def new_event(home: Home) -> int:
    """The address of an event of the home's device; 0 where its streams do not know such: then every copy is waited for."""
    event = home.abi.lib.ggml_backend_event_new(home.device)
    return 0 if event == home.abi.ffi.NULL else home.abi.number(event)


@cache
def _looker() -> Any:
    from bel.runtime.pool_machine import make_looker

    return make_looker()
