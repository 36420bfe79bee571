"""Where a model's graph chooses experts and where it uses them, learnt from one token that is computed for nothing else.

Names and order of nodes: `build_moe_ffn` in src/llama-graph.cpp of llama.cpp build 11549.  The ids of layer L are the node
`ffn_moe_topk-L`.  From it the weights of the experts are gathered, in nodes that all begin `ffn_moe_weights`; behind the
last of them only the products of the experts and the additions of their biases read the ids, so there, and not earlier, the
ids may be replaced.  To stop in the midst of those nodes would also keep a GPU from computing them in one kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bel.formats.errors import MachineError
from bel.formats.experts_file import LayerLayout
from bel.formats.manifest import TensorRow
from bel.runtime.llama_abi import TYPE_F32
from bel.runtime.pool_home import Home
from bel.runtime.tensor import Tensor

ARCHITECTURES = ("qwen3moe", "qwen2moe", "deepseek2", "glm4moe", "olmoe", "gpt-oss", "granitemoe", "llama")
"""Those whose nodes were looked at, and whose output is compared with stock's by a test."""
_NODE = re.compile(rb"(ffn_moe_[a-z_]+)-(\d+)( \((?:reshaped|view)\))?")
_PRODUCT, _BIAS, _GATHER = "MUL_MAT_ID", "ADD_ID", "GET_ROWS"
DOWN = "down"
SCRATCH_SPARE_BYTES = 1 << 16  # what a device's kernel may read behind a row


@dataclass(frozen=True, slots=True)
class PartGraph:
    """One projection of a layer's experts: its number among the parts of a blob, the address of its weight's tensor, and the
    parameters of its product."""

    role: str
    number: int
    weight: int
    type_id: int
    ne: tuple[int, int]
    stride_bytes: int
    offset_bytes: int
    op_params: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BiasGraph:
    """The biases (rows, experts) of a projection: the address of the tensor, of its data, and the bytes of a row."""

    role: str
    tensor: int
    data: int
    stride_bytes: int


@dataclass(slots=True)
class LayerGraph:
    """The nodes of a layer by name: `router` is the stop before the products, `output` the one behind them, `input` what the
    products read.  `activation` is the parameters of the gated unit between them.  `router_weight`, of the shape `router_ne`
    (n_embd, n_expert), is the address of the tensor whose product with `input` ranks the experts, 0 where it is with something
    else; `norm` that of the weights (n_embd,) of the norm before it, or 0."""

    layer: int
    n_expert: int
    top_k: int
    topk: bytes = b""
    router: bytes = b""
    input: bytes = b""
    output: bytes = b""
    activation: tuple[int, ...] = ()
    router_weight: int = 0
    router_ne: tuple[int, int] = (0, 0)
    norm: int = 0
    parts: list[PartGraph] = field(default_factory=list)
    biases: list[BiasGraph] = field(default_factory=list)

    def part(self, role: str) -> PartGraph:
        """The projection of that role."""
        return next(part for part in self.parts if part.role == role)


class GraphLearner:
    """An observer of one decode of one token.  `layers` are those that it reaches; what it computes is garbage.

    It lets the products read `scratch`, an address in the home with room for the top-k of the largest part.
    """

    def __init__(self, home: Home, ffi: Any, layers: Sequence[LayerLayout], tensors: Sequence[TensorRow], scratch: int) -> None:
        self._home, self._ffi, self._scratch = home, ffi, scratch
        self.graphs = {x.layer: LayerGraph(x.layer, x.n_expert, 0) for x in layers}
        self._parts = {tensors[part.tensor].name: (layer, part) for layer in layers for part in layer.parts}
        self._ids: dict[int, tuple[LayerGraph, Tensor]] = {}
        self._products: dict[int, tuple[LayerGraph, str]] = {}
        self._gathered: dict[int, Tensor] = {}
        self._order: dict[int, int] = {}
        self._ranked: dict[int, int] = {}

    def ask(self, tensor: Tensor) -> bool:
        """Learn from a node that is about to be computed."""
        match = _NODE.fullmatch(tensor.raw_name)
        graph = self.graphs.get(int(match[2])) if match else None
        op = tensor.op
        if match and graph and match[1] == b"ffn_moe_topk" and not match[3]:
            graph.topk, graph.top_k = tensor.raw_name, tensor.ne[0]
            self._ids[tensor.identity] = (graph, tensor)
        elif match and graph and match[1] == b"ffn_moe_logits" and tensor.is_product:
            self._ranks(tensor, graph)
        elif match and graph and match[1].startswith(b"ffn_moe_weights"):
            self._gathered[graph.layer] = tensor
        for index in range(3):
            source = tensor.src(index)
            if source is not None and source.identity in self._ids:
                self._reads_ids(tensor, op, self._ids[source.identity][0])
        if op == "GLU":
            self._activates(tensor)
        self._order[tensor.identity] = len(self._order)
        return bool(match and graph and match[1] == b"ffn_moe_weights" and not match[3])

    def _ranks(self, tensor: Tensor, graph: LayerGraph) -> None:
        weight, values = tensor.src(0), tensor.src(1)
        if weight is None or values is None or values.type_id != TYPE_F32:
            return
        graph.router_weight, graph.router_ne = weight.identity, weight.ne[:2]
        self._ranked[graph.layer] = values.identity
        norm = values.src(1) if values.op == "MUL" else None
        if norm is not None and norm.type_id == TYPE_F32 and norm.ne == (weight.ne[0], 1, 1, 1):
            graph.norm = norm.identity

    def seen(self, tensor: Tensor) -> None:
        """The weights were gathered: let the products read the first experts of the scratch."""
        layer = int(tensor.raw_name.rpartition(b"-")[2])
        ids = next(ids for graph, ids in self._ids.values() if graph.layer == layer)
        self._is_at_home(Tensor(self._ffi, None, self._struct(ids).view_src))
        choose_first(self._home, ids)

    def _reads_ids(self, tensor: Tensor, op: str, graph: LayerGraph) -> None:
        if op == _PRODUCT:
            self._product(tensor, graph)
        elif op == _BIAS:
            self._bias(tensor, graph)
        elif op != _GATHER or graph.router or not tensor.raw_name.startswith(b"ffn_moe_weights-"):
            raise MachineError(f"the slot pool does not know what this node of the graph is: {tensor.name} ({op})")

    def _product(self, tensor: Tensor, graph: LayerGraph) -> None:
        weight, values = tensor.src(0), tensor.src(1)
        found = self._parts.get(weight.name) if weight is not None else None
        if weight is None or values is None or found is None or found[0].layer != graph.layer:
            raise MachineError(f"the product {tensor.name} does not use the bundle's experts")
        layer, part = found
        if not graph.router:
            graph.router = self._gathered[graph.layer].raw_name
        if weight.nb[2] != part.size_bytes or weight.ne[2] != layer.n_expert:
            raise MachineError("llama.cpp holds the experts in another form", tensor=weight.name)
        node, raw = self._struct(tensor), self._struct(weight)
        self._is_at_home(tensor)
        graph.parts.append(
            PartGraph(
                part.role,
                layer.parts.index(part),
                weight.identity,
                weight.type_id,
                weight.ne[:2],
                part.size_bytes,
                part.offset_bytes,
                tuple(node.op_params),
            )
        )
        if part.role == DOWN:
            graph.output = tensor.raw_name
        else:
            source = self._struct(values).view_src
            origin = values if source == self._ffi.NULL else Tensor(self._ffi, None, source)
            ids = tensor.src(2)  # seen before what lies between them and the stop is computed
            if ids is None or self._order.get(origin.identity, len(self._order)) > self._order[ids.identity]:
                raise MachineError(f"the input of {tensor.name} is not known when its experts are chosen")
            graph.input = origin.raw_name
            if self._ranked.get(graph.layer) != origin.identity:
                graph.router_weight = 0
        self._products[tensor.identity] = (graph, part.role)
        raw.data = self._ffi.cast("void *", self._scratch)

    def _is_at_home(self, tensor: Tensor) -> None:
        """Raise MachineError for a node that another device computes: copies to it would go the wrong way."""
        buffer = self._struct(tensor).buffer
        abi = self._home.abi
        if buffer == self._ffi.NULL or abi.lib.ggml_backend_buffer_get_type(buffer) != self._home.kind:
            raise MachineError(f"llama.cpp does not compute {tensor.name} on {self._home.name}")

    def _bias(self, tensor: Tensor, graph: LayerGraph) -> None:
        source, bias = tensor.src(0), tensor.src(1)
        if source is None or bias is None or source.identity not in self._products:
            raise MachineError(f"the slot pool does not know what this node of the graph is: {tensor.name}")
        role = self._products[source.identity][1]
        graph.biases.append(BiasGraph(role, bias.identity, bias.address, bias.nb[1]))
        self._products[tensor.identity] = (graph, role)
        if role == DOWN:
            graph.output = tensor.raw_name

    def _activates(self, tensor: Tensor) -> None:
        first, second = tensor.src(0), tensor.src(1)
        roles = [self._products.get(x.identity, (None, ""))[1] for x in (first, second) if x is not None]
        if roles == ["gate", "up"] and first is not None:
            self._products[first.identity][0].activation = tuple(self._struct(tensor).op_params)

    def finish(self) -> list[LayerGraph]:
        """What was learnt, in the order of the layers.  Raises MachineError where it is not whole."""
        for graph in self.graphs.values():
            roles = sorted(part.role for part in graph.parts)
            if roles != ["down", "gate", "up"] or not (graph.router and graph.input and graph.activation):
                raise MachineError(
                    f"layer {graph.layer} does not compute its experts in the way that the slot pool knows",
                    found=f"parts {', '.join(roles) or 'none'}",
                    expected="gate, up and down with a gated unit between them",
                )
            graph.parts.sort(key=lambda part: part.number)  # as they stand in host memory
        return list(self.graphs.values())

    def _struct(self, tensor: Tensor) -> Any:
        return self._ffi.cast("struct ggml_tensor *", tensor.identity)


class ChoiceObserver:
    """An observer that stops behind each choice; `chosen` is called with the layer's place and the node of the ids."""

    def __init__(self, graphs: Sequence[LayerGraph], chosen: Callable[[int, Tensor], None]) -> None:
        self._chosen = chosen
        self._topk = {graph.topk: i for i, graph in enumerate(graphs)}
        self._router = {graph.router: i for i, graph in enumerate(graphs)}
        self._nodes: dict[int, Tensor] = {}

    def ask(self, tensor: Tensor) -> bool:
        """Behind each choice."""
        name = tensor.raw_name
        if name in self._topk:
            self._nodes[self._topk[name]] = tensor
        return name in self._router

    def seen(self, tensor: Tensor) -> None:
        """A choice is made."""
        i = self._router[tensor.raw_name]
        self._chosen(i, self._nodes[i])


def choose_first(home: Home, ids: Tensor) -> None:
    """Let every row of a choice, the node `ids`, take the first experts."""
    rows, step = ids.ne[1], ids.nb[1] // 4
    if rows == 0:
        return
    values = np.tile(np.arange(step, dtype=np.int32), rows)
    size = (rows - 1) * ids.nb[1] + 4 * ids.ne[0]
    home.abi.lib.ggml_backend_tensor_set(home.abi.pointer(ids.identity), home.abi.pointer(values.ctypes.data), 0, size)


def scratch_bytes(layers: Sequence[LayerLayout]) -> int:
    """What `GraphLearner` needs in the home."""
    return max((x.n_used or x.n_expert) * part.size_bytes for x in layers for part in x.parts) + SCRATCH_SPARE_BYTES
