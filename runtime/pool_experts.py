"""Missing experts of one token, computed on the CPU from host memory by the kernels that stock llama.cpp has for it.

The graph is that of `build_moe_ffn` (src/llama-graph.cpp of llama.cpp build 11549) from the experts' input to the rows that
are weighted and summed, for so many experts as are missing.  A row of `mul_mat_id` does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bel.formats.errors import MachineError
from bel.runtime.llama_abi import PRODUCT_FUNCTIONS, TYPE_F32, TYPE_I32
from bel.runtime.llama_check import check_symbols
from bel.runtime.llama_library import LlamaLibrary
from bel.runtime.pool_abi import PoolAbi
from bel.runtime.pool_graph import LayerGraph
from bel.runtime.pool_hosts import HostExperts
from bel.runtime.slot_memory import SlotMemory

SWIGLU, SWIGLU_OAI = 2, 3  # enum ggml_glu_op
_GRAPH_NODES = 16
_NODES = 8  # three products, three biases, one unit, and one to spare
_SPARE_BYTES = 4096
_ALIGNED_FLOATS = 16


class CpuExperts:
    """A graph for each layer and each number of missing experts from 1 to the layer's top-k.

    `input` float32 (n_embd,) and `experts` int32 (top_k,), the ids, are what it computes from; `outputs` is what comes out.
    Close it.
    """

    def __init__(
        self,
        library: LlamaLibrary,
        abi: PoolAbi,
        graphs: Sequence[LayerGraph],
        hosts: HostExperts,
        memory: SlotMemory,
        n_threads: int,
    ) -> None:
        check_symbols(library.ffi, library.lib, str(library.path), PRODUCT_FUNCTIONS)
        self._ffi, self._lib, self._abi, self._hosts = library.ffi, library.lib, abi, hosts
        top_k = max(graph.top_k for graph in graphs)
        n_embd = max(graph.part("gate").ne[0] for graph in graphs)
        n_ff = max(graph.part("gate").ne[1] for graph in graphs)
        self.input = _floats(n_embd)
        self.experts = np.zeros(top_k, np.int32)
        self._rooms = {role: _floats(top_k * n_ff) for role in ("gate", "up", "gate bias", "up bias", "unit")}
        self._rooms |= {role: _floats(top_k * n_embd) for role in ("down", "down bias")}
        self._contexts: list[tuple[Any, Any]] = []
        self._memory = memory
        self.graphs: list[list[int]] = []
        """Addresses of graphs: `graphs[i][m - 1]` of layer i for m experts."""
        self.outputs: list[npt.NDArray[np.float32]] = []
        """The rows of layer i, flat: row r begins at r * n_embd."""
        self.backend: Any = self._lib.ggml_backend_cpu_init()
        self.backend_address = int(self._ffi.cast("uintptr_t", self.backend))
        try:
            for i, graph in enumerate(graphs):
                self._add_layer(i, graph)
        except BaseException:
            self.close()
            raise
        self._lib.ggml_backend_cpu_set_n_threads(self.backend, n_threads)

    def _add_layer(self, i: int, graph: LayerGraph) -> None:
        if graph.activation[0] not in (SWIGLU, SWIGLU_OAI):
            raise MachineError(
                f"the CPU cannot stand in for layer {graph.layer}: its gated unit is not SwiGLU", found=graph.activation[0]
            )
        each = _NODES * self._lib.ggml_tensor_overhead() + self._lib.ggml_graph_overhead_custom(_GRAPH_NODES, False)
        size = (graph.top_k + 2) * (each + _SPARE_BYTES)
        memory = self._ffi.new("char[]", size)
        context = self._lib.ggml_init(self._ffi.new("struct ggml_init_params *", (size, memory, True))[0])
        self._contexts.append((context, memory))
        stacks = {part.role: self._stack(context, i, graph, part.role) for part in graph.parts}
        biases = {
            place.bias.role: self._tensor(context, TYPE_F32, (*place.rows.view(np.float32).shape[::-1], 1), place.rows)
            for place in self._memory.biases[i]
        }
        self.graphs.append([self._graph(context, graph, stacks, biases, m) for m in range(1, graph.top_k + 1)])
        self.outputs.append(self._rooms["down bias" if "down" in biases else "down"])

    def _stack(self, context: Any, i: int, graph: LayerGraph, role: str) -> Any:
        part = graph.part(role)
        room = self._hosts.parts[i][part.number]
        tensor = self._lib.ggml_new_tensor_3d(context, part.type_id, *part.ne, graph.n_expert)
        tensor.data = self._ffi.cast("void *", room.base)
        tensor.nb[2], tensor.nb[3] = room.stride_bytes, room.stride_bytes * graph.n_expert
        return tensor

    def _graph(self, context: Any, graph: LayerGraph, stacks: dict[str, Any], biases: dict[str, Any], count: int) -> int:
        n_embd = graph.part("gate").ne[0]
        values = self._tensor(context, TYPE_F32, (n_embd, 1, 1), self.input)
        experts = self._tensor(context, TYPE_I32, (count, 1, 1), self.experts)

        def projected(role: str, source: Any) -> Any:
            node = self._lib.ggml_mul_mat_id(context, stacks[role], source, experts)
            node.op_params = graph.part(role).op_params  # stock's precision
            node = self._placed(node, role)
            if role not in biases:
                return node
            return self._placed(self._abi.lib.ggml_add_id(context, node, biases[role], experts), f"{role} bias")

        up, gate = projected("up", values), projected("gate", values)
        if graph.activation[0] == SWIGLU:
            unit = self._abi.lib.ggml_swiglu_split(context, gate, up)
        else:
            unit = self._abi.lib.ggml_swiglu_oai(context, gate, up, 0.0, 0.0)
        unit = self._placed(unit, "unit")
        unit.op_params = graph.activation
        result = projected("down", unit)
        made = self._lib.ggml_new_graph_custom(context, _GRAPH_NODES, False)
        self._lib.ggml_build_forward_expand(made, result)
        return int(self._ffi.cast("uintptr_t", made))

    def _placed(self, node: Any, room: str) -> Any:
        tensor = self._ffi.cast("struct ggml_tensor *", node)
        tensor.data = self._ffi.cast("void *", self._rooms[room].ctypes.data)
        return tensor

    def _tensor(self, context: Any, type_id: int, ne: tuple[int, int, int], data: npt.NDArray[Any]) -> Any:
        tensor = self._lib.ggml_new_tensor_3d(context, type_id, *ne)
        tensor.data = self._ffi.cast("void *", data.ctypes.data)
        return tensor

    def compute(self, i: int, experts: Sequence[int]) -> None:
        """Compute experts of layer i from `input`; row r of `outputs[i]` is that of `experts[r]`.  Raises MachineError."""
        count = len(experts)
        self.experts[:count] = experts
        graph = self._abi.pointer(self.graphs[i][count - 1])
        status = self._abi.lib.ggml_backend_graph_compute(self.backend, graph)
        if status != 0:
            raise MachineError("llama.cpp could not compute missing experts on the CPU", found=f"status {status}")

    def close(self) -> None:
        """Give back what the library holds.  A second call does nothing."""
        contexts, self._contexts = self._contexts, []
        for context, _ in contexts:
            self._lib.ggml_free(context)
        backend, self.backend = self.backend, None
        if backend is not None:
            self._lib.ggml_backend_free(backend)


def _floats(count: int) -> npt.NDArray[np.float32]:
    """Room for numbers at an address that vector loads like."""
    raw = np.zeros(count + _ALIGNED_FLOATS, np.float32)
    skip = -raw.ctypes.data % (4 * _ALIGNED_FLOATS) // 4
    return raw[skip : skip + count]
