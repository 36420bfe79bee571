"""The slot pool in plain Python: what the compiled callback (`pool_native.py`) does, to be read and to be compared with it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from bel.formats.errors import MachineError
from bel.runtime.pool_abi import PoolAbi
from bel.runtime.pool_counters import (
    ABSENT as N_ABSENT,
)
from bel.runtime.pool_counters import (
    ACCESSES,
    CALLS,
    MISSED,
    MOVED_BYTES,
    STAGE_CALLS,
    STAGED_BYTES,
    UPLOADED_BYTES,
    WAIT_NS,
)
from bel.runtime.pool_parts import PoolParts
from bel.runtime.pool_step import (
    ABSENT,
    DISTINCT,
    LOAD,
    RANK,
    ROW,
    SLOT_OF,
    STOOD,
    TO,
    plan_call,
    uses_nearly_all,
)
from bel.runtime.slot_memory import SLOT, STAGE
from bel.runtime.tensor import Tensor

_TOPK, _INPUT, _ROUTER, _OUTPUT = range(4)


class PoolObserver:
    """Observes the graphs of one context.  `end` is for what follows a decode."""

    def __init__(self, abi: PoolAbi, parts: PoolParts) -> None:
        self._abi, self._graphs, self._layers = abi, parts.graphs, parts.layers
        self._memory, self._cpu, self._counters = parts.memory, parts.cpu, parts.counters
        self._mode, self._share = parts.mode, parts.share
        self._names: dict[bytes, tuple[int, int]] = {}
        for i, graph in enumerate(parts.graphs):
            for what, name in ((_INPUT, graph.input), (_TOPK, graph.topk), (_ROUTER, graph.router), (_OUTPUT, graph.output)):
                self._names.setdefault(name, (what, i))
        self._nodes: dict[tuple[int, int], Tensor] = {}
        self._absent: tuple[list[int], list[int]] = ([], [])
        self._is_staged = [False] * len(parts.graphs)
        self._served: set[int] = set()
        self._begun = -1
        self._distinct = 0

    def ask(self, tensor: Tensor) -> bool:
        """Whether to stop: behind the choice of experts, and behind their products where the CPU may have to add rows."""
        found = self._names.get(tensor.raw_name)
        if found is None:
            return False
        self._nodes[found] = tensor
        return found[0] == _ROUTER or (found[0] == _OUTPUT and self._stops_behind(found[1], tensor.ne[2]))

    def _stops_behind(self, i: int, rows: int) -> bool:
        """Whether to stop behind the products of layer i: for rows of the CPU's, or to fill the next layer's stage early.

        That of the last layer is not: of a prompt it computes the last token alone, and the others' experts would come in vain.
        """
        layer = self._layers[i]
        if rows == 1:
            return self._cpu is not None
        return i + 2 < len(self._layers) and uses_nearly_all(self._distinct, layer.n_expert)

    def seen(self, tensor: Tensor) -> None:
        """Serve a choice, or add what the CPU computes."""
        what, i = self._names[tensor.raw_name]
        if what == _ROUTER:
            self._serve(i)
        elif tensor.ne[2] == 1:
            self._add_rows(i, tensor)
        else:
            self._begin_stage(i + 1)

    def end(self) -> None:
        """A decode has ended.  Raises MachineError where a layer was computed unasked."""
        missing = len(self._layers) - len(self._served)
        self._served.clear()
        self._begun = -1
        if missing:
            raise MachineError(f"llama.cpp did not choose experts in {missing} layers; the output cannot be trusted")

    def _serve(self, i: int) -> None:
        layer, topk = self._layers[i], self._nodes[_TOPK, i]
        self._served.add(i)
        ids = topk.array(2)
        if ids.size == 0:
            return
        if ids.dtype != np.int32 or int(ids.min()) < 0 or int(ids.max()) >= layer.n_expert:
            raise MachineError("llama.cpp chose an expert that does not exist", tensor=topk.name)
        self._meet(i, topk, np.ascontiguousarray(ids, np.uint16))

    def _meet(self, i: int, topk: Tensor, ids: npt.NDArray[np.uint16]) -> None:
        """Bring what the call `ids` (rows, top_k) chose, and rename the choice of a single row, the node `topk`."""
        layer = self._layers[i]
        state = layer.cache
        distinct, missed, loads, absent = plan_call(
            state.ints, state.reals, layer.table, layer.ask, ids, layer.row, self._mode, self._share
        )
        is_staged = len(ids) > 1
        self._count(distinct, missed, absent, is_staged)
        self._distinct = distinct
        self._point(i, is_staged)
        if is_staged:
            self._stage(i, distinct, loads)
        else:
            self._upload(i, loads)
            self._rename(topk, layer.ask[ROW, : layer.top_k].astype(np.int32))
        if absent:
            self._absent = (layer.ask[RANK, :absent].tolist(), layer.ask[ABSENT, :absent].tolist())
            self._read_input(i)
        self._memory.wait()

    def _rename(self, topk: Tensor, slots: npt.NDArray[np.int32]) -> None:
        """Let the products of a single row take `slots` for its experts."""
        self._abi.lib.ggml_backend_tensor_set(
            self._abi.pointer(topk.identity), self._abi.pointer(slots.ctypes.data), 0, slots.nbytes
        )

    def _point(self, i: int, is_staged: bool) -> None:
        if is_staged != self._is_staged[i]:
            self._memory.point(i, STAGE if is_staged else SLOT)
            self._is_staged[i] = is_staged

    def _upload(self, i: int, loads: int) -> None:
        ask = self._layers[i].ask
        for expert, slot in zip(ask[LOAD, :loads].tolist(), ask[TO, :loads].tolist(), strict=True):
            self._add(UPLOADED_BYTES, self._memory.upload(i, expert, slot))

    def _begin_stage(self, i: int) -> None:
        """Begin to bring all experts of layer i that have no slot to the stage, which no layer reads any more."""
        layer = self._layers[i]
        for expert in range(layer.n_expert):
            if layer.table[SLOT_OF, expert] < 0:
                self._add(STAGED_BYTES, self._memory.stage(i, expert))
        self._begun = i

    def _stage(self, i: int, distinct: int, loads: int) -> None:
        ask = self._layers[i].ask
        size = sum(place.part.stride_bytes for place in self._memory.parts[i])
        for expert, slot in zip(ask[DISTINCT, :distinct].tolist(), ask[STOOD, :distinct].tolist(), strict=True):
            if slot >= 0:
                self._memory.stage_slot(i, expert, slot)
                self._add(MOVED_BYTES, size)
            elif self._begun != i:
                self._add(STAGED_BYTES, self._memory.stage(i, expert))
        self._begun = -1
        self._memory.wait()
        for expert, slot in zip(ask[LOAD, :loads].tolist(), ask[TO, :loads].tolist(), strict=True):
            self._memory.keep(i, expert, slot)
            self._add(MOVED_BYTES, size)

    def _read_input(self, i: int) -> None:
        assert self._cpu is not None, "only then is an expert absent"
        node = self._nodes[_INPUT, i]
        data = self._abi.pointer(self._cpu.input.ctypes.data)
        size = 4 * self._graphs[i].part("gate").ne[0]
        self._abi.lib.ggml_backend_tensor_get(self._abi.pointer(node.identity), data, 0, size)

    def _add_rows(self, i: int, output: Tensor) -> None:
        ranks, experts = self._absent
        self._absent = ([], [])
        if not ranks or self._cpu is None:
            return
        began = time.perf_counter_ns()
        self._cpu.compute(i, experts)
        self._add(WAIT_NS, time.perf_counter_ns() - began)
        size = 4 * output.ne[0]
        rows: Any = self._cpu.outputs[i].ctypes.data
        for row, rank in enumerate(ranks):
            data = self._abi.pointer(rows + row * size)
            self._abi.lib.ggml_backend_tensor_set(self._abi.pointer(output.identity), data, rank * output.nb[1], size)

    def _count(self, distinct: int, missed: int, absent: int, is_staged: bool) -> None:
        for what, count in ((CALLS, 1), (ACCESSES, distinct), (MISSED, missed), (N_ABSENT, absent), (STAGE_CALLS, is_staged)):
            self._add(what, count)

    def _add(self, what: int, count: int) -> None:
        self._counters.rows[self._counters.phase[0], what] += count
