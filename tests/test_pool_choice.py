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
from bel.runtime.policies import parse_policy
from bel.runtime.pool_choice import is_seen, wait_for_choice
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
    stop and `within` it; `whole` tells of each stop whether the backend had its function behind it.

    `is_late`: ids of a single row come some time behind the stop, or when the stream is waited for.  `rows`: where they come,
    by layer, and what was there when the graph went on to choose.  `is_failing`: the next held stop is not reached.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = self.field = 0
        self.stops: list[int] = []
        self.within: list[int] = []
        self.whole: list[bool] = []
        self.rows: dict[int, tuple[int, list[int]]] = {}
        self.is_late = self.is_failing = False
        self._writing: threading.Thread | None = None
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._wait)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value
        outer = self

        class Watch(BackendWatch):
            def _make(self, device: Any, params: Any) -> Any:
                backend = super()._make(device, params)
                view = self._home.abi.ffi.cast("struct backend *", backend)
                view.synchronize = self._home.abi.pointer(outer.address or 0)
                outer._compute = outer._computing(self._home.abi.number(view.graph_compute))
                view.graph_compute = self._home.abi.pointer(ctypes.cast(outer._compute, ctypes.c_void_p).value or 0)
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
                if self.is_late:
                    self._delay()
            reached = self.count
            answer = int(own(node, is_ask, user_data))
            if not is_ask:
                self.within.append(self.count - reached)
                self.whole.append(self.is_whole)
            elif answer:
                self.rows |= {i: (ids.ctypes.data, ids.tolist()) for i, ids in self._picked()}
            before[0] = self.count
            return answer

        self._kept = kind(on_node)
        address = ctypes.cast(self._kept, ctypes.c_void_p).value
        monkeypatch.setattr(pool_native, "_callback", lambda: SimpleNamespace(address=address))
        monkeypatch.setattr(pool_native, "BackendWatch", Watch)
        monkeypatch.setattr(pool_model, "NativePool", Noted)

    def _wait(self, _backend: int) -> None:
        self.count += 1
        if self._writing is not None:
            self._writing.join()

    def _computing(self, own: int) -> Any:
        """A backend's `graph_compute`, which may fail."""
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        real = kind(own)

        def compute(backend: int, graph: int) -> int:
            if self.is_failing and not self.is_whole:
                self.is_failing = False
                return -1
            return int(real(backend, graph))

        return kind(compute)

    def _picked(self) -> list[tuple[int, Any]]:
        """The layers that choose for a single row, and their ids."""
        if self.native is None:
            return []
        found = []
        for i, layer in enumerate(self.native._layers):
            if layer[at.IS_PICKED]:
                data = ctypes.c_int64.from_address(int(layer[at.TOPK_NODE] + self.native.root[at.AT_DATA])).value
                found.append((i, np.ctypeslib.as_array((ctypes.c_int32 * int(layer[at.TOP_K])).from_address(data))))
        return found

    def _delay(self) -> None:
        """Take away the ids that a stop waits for, and bring them a little later, the last one first."""
        if self._writing is not None:
            self._writing.join()
        for _, ids in self._picked():
            values = ids.tolist()
            ids[:] = -1
            self._writing = threading.Thread(target=self._write, args=(ids, values))
            self._writing.start()

    def _write(self, ids: Any, values: list[int]) -> None:
        for rank in reversed(range(len(values))):
            time.sleep(0.0001)
            ids[rank] = values[rank]

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
    waits.whole.clear()
    run.context.decode([1] * n_tokens)
    assert waits.is_whole
    assert all(waits.whole), "whoever fetches or fails behind a stop has to wait"
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
def test_a_choice_that_comes_late_is_waited_for(opened: PoolRun, waits: Waits) -> None:
    waits.is_late = True
    logits = run_tokens(opened.context, N_PROMPT, N_DECODE, True, opened.pool.counters)
    waits.is_late = False
    assert largest_difference(logits, stock(TINY, N_PROMPT, N_DECODE)) == 0.0


@pytest.mark.parametrize("opened", ["upload"], indirect=True)
def test_each_layer_has_a_row_of_its_own_where_no_id_is_yet(opened: PoolRun, waits: Waits) -> None:
    """In that of the layer before the GPU still reads the ids for their weights, when this one is asked for."""
    for _ in range(2):
        waits.rows.clear()
        opened.context.decode([1])
        n_layers = len(opened.pool.layers)
        assert sorted(waits.rows) == list(range(n_layers))
        assert len({address for address, _ in waits.rows.values()}) == n_layers
        assert all(set(ids) == {-1} for _, ids in waits.rows.values())


def test_ids_that_are_written_more_than_once_are_not_waited_for() -> None:
    layer = np.zeros(at.LAYER, np.int64)
    layer[at.IS_PICKED] = 1
    for n_expert, expected in ((8, True), (at.MOST_SORTED, True), (at.MOST_SORTED + 1, False)):
        layer[at.N_EXPERT] = n_expert
        assert is_seen(layer) == expected
    layer[at.IS_PICKED], layer[at.N_EXPERT] = 0, 8
    assert not is_seen(layer)


@pytest.mark.parametrize("opened", ["upload"], indirect=True)
@pytest.mark.parametrize("fails_in", ["the callback", "llama.cpp"])
def test_a_decode_that_fails_leaves_the_backend_whole(opened: PoolRun, waits: Waits, fails_in: str) -> None:
    """The first time ids are of a kind that nobody knows; the second time the graph cannot be computed up to a held stop."""
    native = waits.native
    assert native is not None
    opened.context.decode([1] * N_PROMPT)
    if fails_in == "the callback":
        before, native.root[at.IDS_BYTES] = int(native.root[at.IDS_BYTES]), 0
        waits.whole.clear()
        waits.within.clear()
        with pytest.raises(MachineError, match="in a form that the slot pool does not know"):
            opened.context.decode([1])
        assert waits.whole[0]
        assert waits.within[0] == 1, "nobody waited before the stop"
        native.root[at.IDS_BYTES] = before
    else:
        waits.is_failing = True
        with pytest.raises(MachineError, match="failed to decode"):
            opened.context.decode([1])
        assert not waits.is_failing
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
    """What waiting for a choice of `top_k` experts in layer 1 needs, none of them there yet.

    `is_endless`: no time goes by, so that a busy machine is not taken for ids that do not come.
    """

    def __init__(self, top_k: int, is_endless: bool) -> None:
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
        clock = system.sched_yield if is_endless else system.clock_gettime
        root[at.CLOCK_GETTIME] = ctypes.cast(clock, ctypes.c_void_p).value or 0
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
    room = Room(top_k, is_endless=True)
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
    room = Room(4, is_endless=False)
    room.ids[1, :3] = 7
    room.wait()
    assert room.n_synchronized == 1


@pytest.mark.parametrize("opened", ["upload"], indirect=True)
def test_an_error_of_one_decode_is_not_the_next_ones(opened: PoolRun, waits: Waits) -> None:
    """Where llama.cpp fails too nobody asks what went wrong within."""
    native = waits.native
    assert native is not None
    native.root[at.ERROR] = at.WRONG_IDS
    native.callback.leave()
    opened.context.decode([1])


@pytest.mark.parametrize("opened", ["split"], indirect=True)
def test_slots_are_filled_anew_once_nothing_reads_them(opened: PoolRun, waits: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    opened.context.decode([1])
    before, found = waits.count, []
    monkeypatch.setattr(pool_model, "_preload", lambda *_: found.append(waits.count) or 0)
    opened.use("upload", parse_policy("lru"))
    assert found == [before + 1]
