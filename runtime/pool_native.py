"""The tables that the compiled callback works on, and the thread that computes missing experts."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from bel.formats.errors import MachineError
from bel.formats.signals import signals_deferred
from bel.formats.units import align_up
from bel.runtime import pool_rows as at
from bel.runtime.backend_watch import BackendWatch
from bel.runtime.cache_rows import Ints
from bel.runtime.compiled import is_compiling
from bel.runtime.context import Context, ContextOptions, NativeCallback
from bel.runtime.engine import Model
from bel.runtime.llama_library import LlamaLibrary
from bel.runtime.pool_abi import PoolAbi, check_tensor_struct
from bel.runtime.pool_counters import PoolCounters
from bel.runtime.pool_experts import CpuExperts
from bel.runtime.pool_graph import LayerGraph
from bel.runtime.pool_guess import GuessGraphs
from bel.runtime.pool_home import Home
from bel.runtime.pool_hosts import HostExperts
from bel.runtime.pool_layers import LayerSlots
from bel.runtime.pool_looker import Looker, new_event
from bel.runtime.pool_names import name_table
from bel.runtime.pool_parts import PoolParts
from bel.runtime.pool_room import HostRoom
from bel.runtime.pool_step import STATIC, UPLOAD
from bel.runtime.pool_thread import CompiledThread
from bel.runtime.slot_memory import SlotMemory

_FUNCTIONS = {
    at.TENSOR_GET: "ggml_backend_tensor_get",
    at.SET_ASYNC: "ggml_backend_tensor_set_async",
    at.SYNCHRONIZE: "ggml_backend_synchronize",
    at.COPY_ASYNC: "ggml_backend_tensor_copy_async",
    at.SET_2D_ASYNC: "ggml_backend_tensor_set_2d_async",
    at.GRAPH_COMPUTE: "ggml_backend_graph_compute",
    at.EVENT_RECORD: "ggml_backend_event_record",
    at.EVENT_WAIT: "ggml_backend_event_wait",
}
_SYSTEM = {at.READ: "read", at.WRITE: "write", at.YIELD: "sched_yield", at.CLOCK_GETTIME: "clock_gettime"}
_SPARE_ROWS = 64  # llama.cpp rounds a ubatch up
MOST_PITCH_BYTES = 1 << 31
"""cudaMemcpy2DAsync refuses rows that are farther apart (cudaDeviceProp::memPitch)."""


class NativePool:
    """The pool behind a compiled callback, for contexts of `context`, one at a time.  Close it behind them.

    At most `n_ahead` experts of the next layer are brought to the stage ahead of their use.
    """

    def __init__(
        self, library: LlamaLibrary, home: Home, parts: PoolParts, *, n_rows: int, spin_us: int, n_ahead: int = 0
    ) -> None:
        if not is_compiling():
            raise MachineError(
                "the slot pool needs numba, which is not installed or was turned off",
                hint="Install it: pip install 'bel-toolkit[profile]'",
            )
        check_tensor_struct(library)
        self._kept: list[Any] = []
        self._graphs, self._n = parts.graphs, len(parts.graphs)
        self.root: Ints = np.zeros(at.ROOT_SIZE, np.int64)
        self._layers: Ints = np.zeros((self._n, at.LAYER), np.int64)
        self._request: Ints = np.zeros(at.REQUEST_SIZE, np.int64)
        self._home, self._n_ahead = home, n_ahead
        self._missing, self._error = 0, (at.NO_ERROR, 0, 0)
        self._open = contextlib.ExitStack()
        with contextlib.ExitStack() as failing:
            failing.callback(self.close)
            self._fill(library, parts, n_rows + _SPARE_ROWS, spin_us)
            failing.pop_all()

    def _fill(self, library: LlamaLibrary, parts: PoolParts, n_rows: int, spin_us: int) -> None:
        self._fill_functions(library, self._home.abi)
        self._fill_home(parts.memory, parts.counters)
        for i, (graph, layer) in enumerate(zip(parts.graphs, parts.layers, strict=True)):
            self._fill_layer(i, graph, layer)
        self._fill_parts(parts.memory, parts.hosts)
        self._fill_names()
        scores = self._fill_room(parts.layers, n_rows)
        self.root[at.STAGE_BEGUN] = -1
        self._fill_events()
        self._fill_ahead(library, scores)
        self.root[at.MODE], self.root[at.SPIN_NS] = parts.mode, 1000 * spin_us
        self.root[at.SHARE] = self._keep(np.array([parts.share], np.float64))
        self.callback = NativeCallback(_callback().address, self.root.ctypes.data, self._leave)
        if parts.cpu is not None:
            self._fill_cpu(parts.cpu)
            self._start()
        self._looker.start(self.root)
        self._looker.use(self._most_ahead(parts.mode))

    @contextlib.contextmanager
    def context(self, model: Model, sizes: ContextOptions) -> Iterator[Context]:
        """A context of the model whose experts are in these slots."""
        watch = BackendWatch(self._home)
        with watch:
            context = model.context(sizes, self.callback, self._end)
        with context:
            self.root[at.GRAPH_BACKEND] = watch.backend
            self.root[at.WAIT_AT], self.root[at.WAIT_FUNCTION] = watch.waiting
            try:
                yield context
            finally:
                with signals_deferred():  # else an interrupt here would free the context under the helper
                    self._leave()
                    self.root[at.WAIT_AT] = 0

    def _keep(self, array: npt.NDArray[Any]) -> int:
        """The address of an array, which lives as long as this."""
        self._kept.append(array)
        return int(array.ctypes.data)

    def _fill_functions(self, library: LlamaLibrary, abi: PoolAbi) -> None:
        for place, name in _FUNCTIONS.items():
            self.root[place] = abi.function(name)
        system = ctypes.CDLL(None)
        for place, name in _SYSTEM.items():
            self.root[place] = ctypes.cast(getattr(system, name), ctypes.c_void_p).value or 0
        for place, field in (
            (at.AT_NAME, "name"),
            (at.AT_DATA, "data"),
            (at.AT_NE, "ne"),
            (at.AT_NB, "nb"),
            (at.AT_TYPE, "type"),
            (at.AT_VIEW_SRC, "view_src"),
            (at.AT_VIEW_OFFS, "view_offs"),
        ):
            self.root[place] = library.ffi.offsetof("struct ggml_tensor", field)

    def _fill_home(self, memory: SlotMemory, counters: PoolCounters) -> None:
        root = self.root
        root[at.HOME_BASE], root[at.HOME_TENSOR] = memory.base, memory.whole
        root[at.SOURCE_TENSOR], root[at.TARGET_TENSOR] = memory.source, memory.target
        root[at.COPY_BACKEND], root[at.OTHER_BACKEND] = memory.backend_address, memory.other_address
        root[at.COUNTS], root[at.PHASE] = self._keep(counters.rows), self._keep(counters.phase)
        root[at.LAYERS], root[at.N_LAYERS] = self._layers.ctypes.data, self._n
        root[at.REQUEST] = self._request.ctypes.data

    def _fill_layer(self, i: int, graph: LayerGraph, layer: LayerSlots) -> None:
        row, cache = self._layers[i], layer.cache
        row[at.N_EXPERT], row[at.TOP_K] = layer.n_expert, layer.top_k
        row[at.INTS], row[at.COLUMNS], row[at.REALS] = self._keep(cache.ints), cache.ints.shape[1], self._keep(cache.reals)
        row[at.TABLE], row[at.TABLE_COLUMNS] = self._keep(layer.table), layer.table.shape[1]
        row[at.ASK], row[at.ROW_ROOM] = self._keep(layer.ask), self._keep(layer.row)
        row[at.ROW_BYTES] = 4 * graph.part("gate").ne[0]

    def _fill_parts(self, memory: SlotMemory, hosts: HostExperts) -> None:
        parts: Ints = np.zeros((self._n, at.N_PARTS, at.PART), np.int64)
        biases: Ints = np.zeros((self._n, at.N_PARTS, at.BIAS), np.int64)
        for i in range(self._n):
            for p, place in enumerate(memory.parts[i]):
                part = place.part
                room = hosts.parts[i][part.number]
                host = (room.base, room.stride_bytes)
                parts[i, p] = (part.weight, part.stride_bytes, *host, place.slots_bytes, place.stage_bytes)
            self._layers[i, at.N_EVEN] = n_even(parts[i])
            for b, bias in enumerate(memory.biases[i]):
                known = bias.bias
                biases[i, b] = (known.tensor, known.data, known.stride_bytes, bias.slots_bytes, self._keep(bias.rows))
            self._layers[i, at.N_BIASES] = len(memory.biases[i])
        self.root[at.PARTS], self.root[at.BIASES] = self._keep(parts), self._keep(biases)

    def _fill_names(self) -> None:
        names: dict[bytes, int] = {}
        for i, graph in enumerate(self._graphs):
            for what, name in (
                (at.INPUT_NAME, graph.input),
                (at.TOPK_NAME, graph.topk),
                (at.ROUTER_NAME, graph.router),
                (at.OUTPUT_NAME, graph.output),
            ):
                names.setdefault(name, what + 4 * i)
        made, root = name_table(names), self.root
        root[at.NAME_KEYS], root[at.NAME_VALUES] = self._keep(made.keys), self._keep(made.values)
        root[at.NAME_BYTES], root[at.NAME_SIZE] = self._keep(made.text), len(made.keys)
        root[at.FIRST_WORDS] = 0 if made.starts is None else self._keep(made.starts)

    def _fill_room(self, layers: Sequence[LayerSlots], n_rows: int) -> int:
        """Memory that the home reads and writes by itself, and other memory.  Returns the room for guesses, or 0."""
        most, top_k = max(x.n_expert for x in layers), max(x.top_k for x in layers)
        if 4 * top_k > at.NAMED_BYTES:
            raise MachineError("the slot pool has no room for so many experts of a token", found=top_k)
        row = align_up(4 * most, at.NAMED_BYTES)
        room = HostRoom(self._home, row + self._n * (row + at.NAMED_BYTES))
        self._open.callback(room.close)
        guessed = room.address + self._n * row
        self.root[at.PICKED], self.root[at.PICKED_BYTES] = room.address if room.is_reached else 0, row
        self.root[at.NAMED] = guessed + row
        self.root[at.IDS], self.root[at.IDS_BYTES] = self._keep(np.zeros(n_rows * most, np.int32)), 4 * n_rows * most
        self.root[at.SHORT] = self._keep(np.zeros(n_rows * top_k, np.uint16))
        self.root[at.CLOCK_ROOM] = self._keep(np.zeros(4, np.int64))
        self.root[at.EVENT_ROOM] = self._keep(np.zeros(2, np.int64))
        return guessed if room.is_reached else 0

    def _most_ahead(self, mode: int) -> int:
        """In slots that never change nothing brought ahead has a place."""
        return 0 if mode == STATIC else self._n_ahead

    def _fill_events(self) -> None:
        for place in (at.COPIED_EVENT, at.OTHER_EVENT, at.KEPT_EVENT):
            event = self.root[place] = new_event(self._home)
            if event:
                self._open.callback(self._home.abi.lib.ggml_backend_event_free, self._home.abi.pointer(int(event)))

    def _fill_ahead(self, library: LlamaLibrary, scores: int) -> None:
        graphs = None
        if self._n_ahead and scores:
            graphs = GuessGraphs(library, self._home, self._graphs, scores)
            self._open.callback(graphs.close)
        self._looker = Looker(self._home, graphs, scores)
        self._open.callback(self._looker.close)
        self.root[at.AHEAD] = self._looker.table.ctypes.data

    def _fill_cpu(self, cpu: CpuExperts) -> None:
        root = self.root
        root[at.HAS_CPU], root[at.CPU_INPUT] = 1, self._keep(cpu.input)
        root[at.CPU_EXPERTS] = self._keep(cpu.experts)
        root[at.CPU_BACKEND] = cpu.backend_address
        for i in range(self._n):
            self._layers[i, at.GRAPHS] = self._keep(np.array(cpu.graphs[i], np.int64))
            self._layers[i, at.CPU_ROWS] = self._keep(cpu.outputs[i])

    def _start(self) -> None:
        thread = CompiledThread("bel-cpu-experts", self._request, at.STOP)
        self._open.callback(thread.close)
        self.root[at.EVENT_FD] = thread.descriptor
        thread.start(_worker(), self.root)

    def wait(self) -> None:
        """Nothing that was computed reads the slots any more; while there is a context."""
        self._home.abi.lib.ggml_backend_synchronize(self._home.abi.pointer(int(self.root[at.GRAPH_BACKEND])))

    def use(self, layers: Sequence[LayerSlots], mode: int, share: float) -> None:
        """Go on with other slots, in another mode; between decodes.  Only a pool with the CPU's experts has all modes."""
        self._looker.use(0)
        for i, (graph, layer) in enumerate(zip(self._graphs, layers, strict=True)):
            self._fill_layer(i, graph, layer)
        self.root[at.MODE], self.root[at.HAS_CPU] = mode, mode != UPLOAD
        self.root[at.SHARE] = self._keep(np.array([share], np.float64))
        self._looker.use(self._most_ahead(mode))

    def _leave(self) -> None:
        """A decode has ended, well or not: llama.cpp waits for its stream again, and nothing of the graph is read any more."""
        root = self.root
        if root[at.IS_HELD]:
            ctypes.c_int64.from_address(int(root[at.WAIT_AT])).value = int(root[at.WAIT_FUNCTION])
            root[at.IS_HELD] = 0
        self._looker.rest()
        self._missing = int((self._layers[:, at.SERVED] == 0).sum())
        self._layers[:, at.SERVED] = 0
        self._error = int(root[at.ERROR]), int(root[at.ERROR_LAYER]), int(root[at.ERROR_VALUE])
        root[at.ERROR] = at.NO_ERROR

    def _end(self) -> None:
        """A decode has ended well for llama.cpp.  Raises MachineError for what went wrong within, and where a layer was
        computed unasked."""
        error, i, value = self._error
        if error != at.NO_ERROR:
            what = {
                at.WRONG_IDS: "llama.cpp chose an expert that does not exist",
                at.TOO_MANY_IDS: "llama.cpp chose experts in a form that the slot pool does not know",
                at.CPU_FAILED: "llama.cpp could not compute missing experts on the CPU",
            }[error]
            raise MachineError(what, tensor=self._graphs[i].topk.decode("utf-8", "replace"), found=value)
        self._looker.check()
        if self._missing:
            raise MachineError(f"llama.cpp did not choose experts in {self._missing} layers; the output cannot be trusted")

    def close(self) -> None:
        """End the threads, give back what they used.  A second call does nothing."""
        self._open.close()


def n_even(parts: Ints) -> int:
    """How many parts of a layer, from the first on, are of one size and stand evenly apart, in host memory, in the slots, and
    on the stage: one copy of rows does for them.  `parts` (3, PART)."""
    count = 1
    for p in range(1, at.N_PARTS):
        first, before, part = parts[0], parts[p - 1], parts[p]
        places = (at.HOST_AT, at.SLOTS_AT, at.STAGE_AT)
        step = [int(parts[1, x] - first[x]) for x in places]
        same = all(int(part[x] - before[x]) == y and 0 < y < MOST_PITCH_BYTES for x, y in zip(places, step, strict=True))
        if not same or part[at.STRIDE] != first[at.STRIDE] or part[at.HOST_STRIDE] != first[at.HOST_STRIDE]:
            break
        count += 1
    return count


@cache
def _callback() -> Any:
    from bel.runtime.pool_machine import make_callback

    return make_callback()


@cache
def _worker() -> Any:
    from bel.runtime.pool_machine import make_worker

    return make_worker()
