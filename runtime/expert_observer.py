"""Where the slots meet llama.cpp's graph: the experts' weights are pointed into the arena, and each choice of the router is
served before the products that read it.

Node names: `build_moe_ffn` in src/llama-graph.cpp of llama.cpp build 11549.  The choice of layer L is the node
`ffn_moe_topk-L`, int32 with ne = [k, rows].
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import numpy as np

from bel.formats.errors import MachineError
from bel.formats.experts_file import LayerLayout
from bel.formats.manifest import TensorRow
from bel.runtime.arena import Arena
from bel.runtime.context import Observer
from bel.runtime.expert_cache import ExpertCache
from bel.runtime.next_experts import NextExperts
from bel.runtime.tensor import Tensor

_PRODUCT = "MUL_MAT_ID"
_IS_BETWEEN = re.compile(rb"ffn_moe_[a-z_]+-\d+")


class ExpertObserver:
    """Observes graphs of one model.  `inner` may look at the nodes too (a recorder)."""

    def __init__(
        self,
        layers: Sequence[LayerLayout],
        tensors: Sequence[TensorRow],
        arena: Arena,
        inner: Observer | None = None,
    ) -> None:
        self._arena, self.inner = arena, inner
        self.cache: ExpertCache
        """Set before the first decode: how many slots fit is known only once the context has its buffers."""
        self._topk = {f"ffn_moe_topk-{x.layer}".encode(): place for place, x in enumerate(layers) if not x.is_mtp}
        self._weights = {
            tensors[part.tensor].name: (place, layer, part.offset_bytes)
            for place, layer in enumerate(layers)
            for part in layer.parts
            if not layer.is_mtp
        }
        self._n_expert = [layer.n_expert for layer in layers]
        self._last_parts = {(place, layer.parts[-1].offset_bytes) for place, layer in enumerate(layers)}
        self._before_last: dict[bytes, int] = {}
        """Nodes whose results the last product of a layer's experts reads: it is time then to have the rest of the weights."""
        self._last: dict[bytes, int] = {}
        self._stops: set[int] = set()
        self._is_placed = False
        self._served: set[int] = set()
        self._next = NextExperts()

    def ask(self, tensor: Tensor) -> bool:
        """Whether llama.cpp must stop at this node."""
        if not self._is_placed:
            self._place(tensor)
        name = tensor.raw_name
        if name in self._last:
            self.cache.finish()  # for a graph that did not stop before
        is_ours = name in self._topk or name in self._before_last
        return (self.inner is not None and self.inner.ask(tensor)) or is_ours

    def seen(self, tensor: Tensor) -> None:
        """Serve a choice.  Raises what the reads raise: the decode must not go on with wrong weights."""
        place = self._topk.get(tensor.raw_name)
        try:
            if place is not None:
                self._serve(place, tensor)
            elif tensor.raw_name in self._before_last:
                self.cache.finish()
            if self.inner is not None and self.inner.ask(tensor):
                self.inner.seen(tensor)
        except BaseException:
            self._served.clear()  # the decode ends here: what it served must not stand for what the next one leaves out
            raise

    def _serve(self, place: int, tensor: Tensor) -> None:
        ids = tensor.array(2)
        self._served.add(place)
        if ids.size == 0:  # the last layer, in an ubatch of which no logits are wanted
            return
        if ids.dtype != np.int32 or int(ids.min()) < 0 or int(ids.max()) >= self._n_expert[place]:
            raise MachineError("llama.cpp chose an expert that does not exist", tensor=tensor.name)
        likely = None
        if len(ids) == 1 and self.cache.prefetch_bytes:
            self._next.see(tensor, place)
            likely = functools.partial(self._next.guess, count=ids.shape[1])
        self.cache.serve(place, ids.astype(np.uint16), whole=place not in self._stops, likely=likely)

    def end(self) -> None:
        """A decode has ended.  Raises MachineError where a layer was computed unasked: its experts may not have been there."""
        self.cache.settle()
        missing = set(self._topk.values()) - self._served
        self._served.clear()
        if self._weights:
            raise MachineError(
                f"llama.cpp did not use the experts of {len(self._weights)} tensors: {next(iter(self._weights))}"
            )
        if missing:
            raise MachineError(f"llama.cpp did not choose experts in {len(missing)} layers; the output cannot be trusted")
        self._stops = set(self._before_last.values())

    def _place(self, tensor: Tensor) -> None:
        """Point the weights of a product into the arena.  llama.cpp asks for all nodes before it computes them."""
        if tensor.op != _PRODUCT:
            return
        weight, values = tensor.src(0), tensor.src(1)
        found = self._weights.pop(weight.name, None) if weight is not None else None
        if weight is None or found is None:
            return
        place, layer, offset = found
        nb, stride = weight.nb, layer.stride_bytes
        weight.place(self._arena.address(place, 0) + offset, (nb[0], nb[1], stride, stride * layer.n_expert))
        if (place, offset) in self._last_parts and values is not None and _IS_BETWEEN.fullmatch(values.raw_name):
            self._before_last[values.raw_name] = place
            self._last[tensor.raw_name] = place
        self._is_placed = not self._weights
