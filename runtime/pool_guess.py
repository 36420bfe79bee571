"""The next layer's router on what this layer's router saw, computed beside the graph: what it ranks first is likely chosen.

The same guess as `next_experts.py` makes for a bundle on the CPU; here llama.cpp's own kernels compute it, in a stream of its
own, from the input where it stands.  The graph may write over that meanwhile: then the guess is a bad one, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from bel.formats.errors import MachineError
from bel.formats.units import align_up
from bel.runtime.llama_abi import TYPE_F32
from bel.runtime.llama_library import LlamaLibrary
from bel.runtime.pool_graph import LayerGraph
from bel.runtime.pool_home import Home

_GRAPH_NODES = 4
_ALIGNED_BYTES = 256
_SPARE_BYTES = 4096


class GuessGraphs:
    """`graphs[i]` is the address of the graph that guesses for the layer behind layer i, 0 where there is none to be made.

    It reads the tensor at `inputs[i]`, float32 (n_embd,), whose data have to be set, and writes a score for each expert,
    float32, to `scores`, an address in host memory.  `backend` computes the graphs, `fetches` is a stream for what they make us
    bring.  Close it before the home.
    """

    def __init__(self, library: LlamaLibrary, home: Home, graphs: Sequence[LayerGraph], scores: int) -> None:
        self._ffi, self._lib, self._abi, self._home = library.ffi, library.lib, home.abi, home
        self._scores = scores
        self._contexts: list[tuple[Any, Any]] = []
        self._buffer: Any = None
        self.backend = self.fetches = 0
        self.graphs: list[int] = [0] * len(graphs)
        self.inputs: list[int] = [0] * len(graphs)
        n_embd = max(graph.router_ne[0] for graph in graphs)
        try:
            self._open_backends()
            self._allocate(n_embd, len(graphs))
            for i, (here, there) in enumerate(pairwise(graphs)):
                if here.router_ne[0] == there.router_ne[0] == n_embd and here.router_weight and there.router_weight:
                    self.graphs[i] = self._graph(i, here, there)
        except BaseException:
            self.close()
            raise

    def _open_backends(self) -> None:
        abi, null = self._abi, self._abi.ffi.NULL
        for name in ("backend", "fetches"):
            made = abi.lib.ggml_backend_dev_init(self._home.device, null)
            if made == null:
                raise MachineError(f"llama.cpp cannot use {self._home.name}", path=abi.path)
            setattr(self, name, abi.number(made))
        if self._home.kind == abi.lib.ggml_backend_cpu_buffer_type():  # its threads would be in the way of the graph's
            self._lib.ggml_backend_cpu_set_n_threads(self._ffi.cast("void *", self.backend), 1)

    def _allocate(self, n_embd: int, n_layers: int) -> None:
        """Rows of n_embd numbers in the home: an input to begin with, what comes of it, and each layer's factors."""
        step = align_up(4 * n_embd, _ALIGNED_BYTES)
        size = (n_layers + 2) * step + _SPARE_BYTES
        self._buffer = self._abi.lib.ggml_backend_buft_alloc_buffer(self._home.kind, size)
        if self._buffer == self._abi.ffi.NULL:
            raise MachineError(f"{self._home.name} has no {size} bytes of memory", path=self._abi.path)
        self._abi.lib.ggml_backend_buffer_clear(self._buffer, 0)
        base = align_up(self._abi.number(self._abi.lib.ggml_backend_buffer_get_base(self._buffer)), _ALIGNED_BYTES)
        self._rows = [base + n * step for n in range(n_layers + 2)]

    def _graph(self, i: int, here: LayerGraph, there: LayerGraph) -> int:
        context = self._context(6)
        values = self._tensor(context, here.router_ne[0], self._rows[0])
        self.inputs[i] = self._number(values)
        if here.norm and there.norm:
            factors = self._tensor(context, there.router_ne[0], self._rows[2 + i])
            ratio = self._ratio(here, there)
            self._abi.lib.ggml_backend_tensor_set(factors, self._abi.ffi.cast("void *", ratio.ctypes.data), 0, ratio.nbytes)
            values = self._placed(self._abi.lib.ggml_mul(context, values, factors), self._rows[1])
        weight = self._ffi.cast("void *", there.router_weight)
        scores = self._placed(self._abi.lib.ggml_mul_mat(context, weight, values), self._scores)
        graph = self._lib.ggml_new_graph_custom(context, _GRAPH_NODES, False)
        self._lib.ggml_build_forward_expand(graph, scores)
        return self._number(graph)

    def _ratio(self, here: LayerGraph, there: LayerGraph) -> npt.NDArray[np.float32]:
        """What turns this layer's normed input into the next one's, as if the stream did not change between them."""
        with np.errstate(all="ignore"):
            return (self._norm(there.norm, there.router_ne[0]) / self._norm(here.norm, here.router_ne[0])).astype(np.float32)

    def _norm(self, tensor: int, n_embd: int) -> npt.NDArray[np.float32]:
        values = np.zeros(n_embd, np.float32)
        pointer = self._abi.ffi.cast("void *", values.ctypes.data)
        self._abi.lib.ggml_backend_tensor_get(self._abi.pointer(tensor), pointer, 0, values.nbytes)
        return values

    def _context(self, tensors: int) -> Any:
        each = self._lib.ggml_tensor_overhead()
        size = tensors * each + self._lib.ggml_graph_overhead_custom(_GRAPH_NODES, False) + _SPARE_BYTES
        memory = self._ffi.new("char[]", size)
        context = self._lib.ggml_init(self._ffi.new("struct ggml_init_params *", (size, memory, True))[0])
        self._contexts.append((context, memory))
        return context

    def _tensor(self, context: Any, count: int, address: int) -> Any:
        return self._placed(self._lib.ggml_new_tensor_2d(context, TYPE_F32, count, 1), address)

    def _placed(self, node: Any, address: int) -> Any:
        tensor = self._ffi.cast("struct ggml_tensor *", node)
        tensor.buffer = self._ffi.cast("void *", self._abi.number(self._buffer))
        tensor.data = self._ffi.cast("void *", address)
        return tensor

    def _number(self, pointer: Any) -> int:
        return int(self._ffi.cast("uintptr_t", pointer))

    def close(self) -> None:
        """Give back what the library holds.  A second call does nothing."""
        contexts, self._contexts = self._contexts, []
        for context, _ in contexts:
            self._lib.ggml_free(context)
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._abi.lib.ggml_backend_buffer_free(buffer)
        backends = (self.backend, self.fetches)
        self.backend = self.fetches = 0
        for backend in backends:
            if backend:
                self._abi.lib.ggml_backend_synchronize(self._abi.pointer(backend))  # it may still bring something
                self._abi.lib.ggml_backend_free(self._abi.pointer(backend))
