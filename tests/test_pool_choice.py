"""What llama.cpp waits for at a stop of a single row: the ids of the choice, not all of the graph's stream."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bel.formats.bundle import open_bundle
from bel.formats.errors import MachineError
from bel.runtime import pool_model, pool_native
from bel.runtime import pool_rows as at
from bel.runtime.backend_watch import BackendWatch
from bel.runtime.engine import Engine
from bel.runtime.pool_choice import wait_for_choice
from bel.runtime.pool_home import cpu_home
from bel.runtime.pool_model import PoolRun, open_pool
from bel.runtime.pool_native import NativePool
from exactness import repack
from pooled import SIZES, largest_difference, pool_options, run_tokens, stock

TINY = Path(__file__).parent.parent / "examples" / "tiny-moe-q8_0.gguf"
N_PROMPT, N_DECODE = 5, 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of the trained example model."""
    return repack(TINY, tmp_path_factory.mktemp("tiny") / "tiny.bel")


class Waits:
    """A graph's backend that has to be waited for, as a GPU's: `count` of the waits since it was made, and those before each
    stop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = self.field = 0
        self.stops: list[int] = []
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._wait)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value
        outer = self

        class Watch(BackendWatch):
            def _make(self, device: Any, params: Any) -> Any:
                backend = super()._make(device, params)
                view = self._home.abi.ffi.cast("struct backend *", backend)
                view.synchronize = self._home.abi.pointer(outer.address or 0)
                return backend

            @property
            def waiting(self) -> tuple[int, int]:
                outer.field, function = super().waiting
                return outer.field, function

        class Noted(NativePool):
            def __init__(self, *arguments: Any, **fields: Any) -> None:
                super().__init__(*arguments, **fields)
                outer.native = self

        self.native: NativePool | None = None
        inner = pool_native._callback()
        kind = ctypes.CFUNCTYPE(ctypes.c_uint8, ctypes.c_int64, ctypes.c_uint8, ctypes.c_int64)
        own, before = kind(inner.address), [0]

        def on_node(node: int, is_ask: int, user_data: int) -> int:
            if not is_ask:
                self.stops.append(self.count - before[0])
            answer = int(own(node, is_ask, user_data))
            before[0] = self.count
            return answer

        self._kept = kind(on_node)
        address = ctypes.cast(self._kept, ctypes.c_void_p).value
        monkeypatch.setattr(pool_native, "_callback", lambda: SimpleNamespace(address=address))
        monkeypatch.setattr(pool_native, "BackendWatch", Watch)
        monkeypatch.setattr(pool_model, "NativePool", Noted)

    def _wait(self, _backend: int) -> None:
        self.count += 1

    @property
    def is_whole(self) -> bool:
        """Whether the backend has its function."""
        return ctypes.c_int64.from_address(self.field).value == self.address


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Counts."""
    return Waits(monkeypatch)


@pytest.fixture
def opened(tiny: Path, waits: Waits, request: pytest.FixtureRequest) -> Iterator[PoolRun]:
    """A pool of 8 slots in the mode of the test, once what waits is in its place."""
    assert waits.count == 0
    engine = Engine.open()
    with open_pool(engine, open_bundle(tiny), SIZES, pool_options(tiny, request.param, slots=8), cpu_home(engine)) as run:
        yield run


def stops_of(waits: Waits, run: PoolRun, n_tokens: int) -> list[int]:
    """How often llama.cpp waited before each stop of a decode."""
    waits.stops.clear()
    run.context.decode([1] * n_tokens)
    assert waits.is_whole
    return list(waits.stops)


@pytest.mark.parametrize(("opened", "n_stops"), [("upload", 1), ("split", 2), ("static", 2)], indirect=["opened"])
def test_no_stop_of_a_single_row_waits_for_the_stream(opened: PoolRun, n_stops: int, waits: Waits) -> None:
    """What a prompt's stops choose is fetched behind all of the stream; its last layer computes a single row."""
    assert waits.native is not None
    n_layers = len(opened.pool.layers)
    assert stops_of(waits, opened, N_PROMPT) == [1] * (n_layers - 1) + [0] * n_stops
    for _ in range(2):
        assert stops_of(waits, opened, 1) == [0] * (n_stops * n_layers)
    waits.native.root[at.WAIT_AT] = 0
    assert stops_of(waits, opened, 1) == [1] * (n_stops * n_layers)


@pytest.mark.parametrize("opened", ["upload"], indirect=True)
def test_logits_are_stocks(opened: PoolRun, waits: Waits) -> None:
    logits = run_tokens(opened.context, N_PROMPT, N_DECODE, True, opened.pool.counters)
    assert largest_difference(logits, stock(TINY, N_PROMPT, N_DECODE)) == 0.0
    assert waits.is_whole


@pytest.mark.parametrize("opened", ["upload"], indirect=True)
@pytest.mark.parametrize("fails_in", ["the callback", "llama.cpp"])
def test_a_decode_that_fails_leaves_the_backend_whole(opened: PoolRun, waits: Waits, fails_in: str) -> None:
    """The first time ids are of a kind that nobody knows; the second time the graph cannot be computed behind a held stop."""
    native = waits.native
    assert native is not None
    opened.context.decode([1] * N_PROMPT)
    if fails_in == "the callback":
        before, native.root[at.IDS_BYTES] = int(native.root[at.IDS_BYTES]), 0
        with pytest.raises(MachineError, match="in a form that the slot pool does not know"):
            opened.context.decode([1])
        native.root[at.IDS_BYTES] = before
    else:
        native.root[at.IS_HELD] = 1  # as where llama.cpp leaves between a stop's two calls
        ctypes.c_int64.from_address(waits.field).value = 0
        native.callback.leave()
    assert waits.is_whole
    assert not native.root[at.IS_HELD]
    opened.context.clear()
    logits = run_tokens(opened.context, N_PROMPT, N_DECODE, True, opened.pool.counters)
    assert largest_difference(logits, stock(TINY, N_PROMPT, N_DECODE)) == 0.0


def test_a_backend_of_another_struct_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the device stands elsewhere."""
    home = cpu_home(Engine.open())
    watch = BackendWatch(home)
    made = home.abi.lib.ggml_backend_dev_init(home.device, home.abi.ffi.NULL)
    view = home.abi.ffi.cast("struct backend *", made)
    monkeypatch.setattr(BackendWatch, "backend", home.abi.number(made))
    try:
        address, function = watch.waiting
        assert ctypes.c_int64.from_address(address).value == function == 0, "the CPU's has none"
        device, view.device = view.device, home.kind
        with pytest.raises(MachineError, match="another binary interface"):
            _ = watch.waiting
        view.device = device
    finally:
        home.abi.lib.ggml_backend_free(made)


class Room:
    """What waiting for a choice of `top_k` experts in layer 1 needs, none of them there yet."""

    def __init__(self, top_k: int) -> None:
        self.root, self.layer = np.zeros(at.ROOT_SIZE, np.int64), np.zeros(at.LAYER, np.int64)
        self.ids, self._clock = np.full((2, 8), -1, np.int32), np.zeros(4, np.int64)
        self.ids[1, top_k:] = 0
        self.n_synchronized = 0
        self._synchronize = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 5)(self._count)
        system = ctypes.CDLL(None)
        root = self.root
        root[at.PICKED], root[at.PICKED_BYTES] = self.ids.ctypes.data, self.ids.strides[0]
        root[at.CLOCK_ROOM] = self._clock.ctypes.data
        root[at.YIELD] = ctypes.cast(system.sched_yield, ctypes.c_void_p).value or 0
        root[at.CLOCK_GETTIME] = ctypes.cast(system.clock_gettime, ctypes.c_void_p).value or 0
        root[at.SYNCHRONIZE] = ctypes.cast(self._synchronize, ctypes.c_void_p).value or 0
        self.layer[at.TOP_K] = top_k

    def _count(self, *_numbers: int) -> int:
        self.n_synchronized += 1
        return 0

    def wait(self) -> None:
        wait_for_choice(self.root, 1, self.layer)


@pytest.mark.parametrize("top_k", [1, 2, 5, 8])
@pytest.mark.parametrize("is_backwards", [False, True])
def test_each_id_is_waited_for(top_k: int, is_backwards: bool) -> None:
    room = Room(top_k)
    Room(top_k).wait()  # compiled by now
    written: list[int] = []

    def write() -> None:
        for rank in sorted(range(top_k), reverse=is_backwards):
            time.sleep(0.0004)
            written.append(rank)
            room.ids[1, rank] = 0x7FFF - rank

    thread = threading.Thread(target=write)
    thread.start()
    room.wait()
    assert len(written) == top_k
    thread.join()
    assert room.n_synchronized == 0


def test_ids_that_do_not_come_end_in_waiting_for_the_stream() -> None:
    room = Room(4)
    room.ids[1, :3] = 7
    room.wait()
    assert room.n_synchronized == 1
