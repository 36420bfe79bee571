"""The observer that reads what the router chose, out of llama.cpp's graph.

Node names and shapes: `build_moe_ffn` in src/llama-graph.cpp of llama.cpp build 11549.  The choice of layer L is the node
`ffn_moe_topk-L`, int32 with ne = [k, tokens], and mostly a view with the row stride of all experts.  The weights go
through up to four nodes, of which the last that a model has is the one that multiplies the experts' outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bel.formats.errors import BadInputError
from bel.formats.trace_header import TraceLayer
from bel.runtime.tensor import Tensor

_WEIGHTS = ("ffn_moe_weights", "ffn_moe_weights_softmax", "ffn_moe_weights_norm", "ffn_moe_weights_scaled")
_ROUTES_TWICE = "grovemoe"
"""Its second pass, over the adjugate experts, repeats the choice of the first under the same node names."""


@dataclass(frozen=True, slots=True)
class Call:
    """What one layer chose for one ubatch: `ids` (n, k) uint16 in slot order, `weights` (n, k) float16, `time_ns`."""

    layer: int
    ids: npt.NDArray[np.uint16]
    weights: npt.NDArray[np.float16] | None
    time_ns: int | None


@dataclass(slots=True)
class _Choice:
    """What was read of one layer in the graph that runs."""

    ids: npt.NDArray[np.int32]
    came_ns: int
    left_ns: int = 0
    weights: npt.NDArray[np.float32] | None = None
    weights_name: bytes = b""
    passes: int = 1


class RouterObserver:
    """Collects the choices of one decode; `take` gives them.  One graph at a time: n_ubatch must be at least n_batch.

    Times: `time_ns` of a layer is the time from its own choice to the next MoE layer's choice (to the end of the decode
    for the last): its experts, and then the attention and router of the next layer.  What this observer does itself is
    left out, and so is what precedes the first choice.
    """

    def __init__(
        self,
        arch: str,
        layers: Sequence[TraceLayer],
        *,
        weights: bool = False,
        times: bool = False,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._arch, self._layers, self._clock_ns = arch, layers, clock_ns
        self._has_weights, self._has_times = weights, times
        names = _WEIGHTS if weights else ()
        self._topk = {f"ffn_moe_topk-{row.layer}".encode(): row.layer for row in layers}
        self._weights = {f"{name}-{row.layer}".encode(): row.layer for row in layers for name in names}
        self._waits_for_weights = False
        """Once a graph has shown which weights are final, llama.cpp stops at those alone, and the ids are read there too."""
        self._nodes: dict[int, Tensor] = {}
        self._choices: dict[int, _Choice] = {}

    def ask(self, tensor: Tensor) -> bool:
        """Whether llama.cpp must stop at this node."""
        name = tensor.raw_name
        layer = self._topk.get(name)
        if layer is None:
            return name in self._weights
        if not self._waits_for_weights:
            return True
        self._nodes.setdefault(layer, tensor)
        return False

    def seen(self, tensor: Tensor) -> None:
        """Read a node that `ask` wanted."""
        came_ns = self._clock_ns()
        name = tensor.raw_name
        layer = self._topk.get(name)
        if layer is not None:
            self._take_ids(layer, tensor, came_ns)
        else:
            layer = self._weights[name]
            if layer in self._nodes:
                self._take_ids(layer, self._nodes.pop(layer), came_ns)
            self._take_weights(layer, name, tensor)
        self._choices[layer].left_ns = self._clock_ns()

    def _take_ids(self, layer: int, tensor: Tensor, came_ns: int) -> None:
        if layer in self._choices:
            self._choices[layer].passes += 1
        else:
            self._choices[layer] = _Choice(_read(tensor, np.int32, 2), came_ns)

    def _take_weights(self, layer: int, name: bytes, tensor: Tensor) -> None:
        choice = self._choices[layer]
        if choice.passes == 1:
            choice.weights, choice.weights_name = _read(tensor, np.float32, 3), name

    def take(self, n_tokens: int) -> list[Call]:
        """The calls of a decode of `n_tokens`, by layer, once it has ended; nothing of it is kept.

        Raises BadInputError where the graph did not route every token once in each layer, as the model's tensors and
        metadata promise.
        """
        choices, ended_ns = self._choices, self._clock_ns()
        self._choices = {}
        self._nodes.clear()
        times = _times(choices, ended_ns) if self._has_times else {}
        calls = [self._call(row, choices.get(row.layer), n_tokens, times) for row in self._layers]
        if self._has_weights and not self._waits_for_weights:
            self._weights = {choice.weights_name: layer for layer, choice in choices.items()}
            self._waits_for_weights = True
        return calls

    def _call(self, row: TraceLayer, choice: _Choice | None, n_tokens: int, times: dict[int, int]) -> Call:
        shape = (n_tokens, row.top_k)
        if choice is None or choice.ids.shape != shape:
            raise self._unlike(row, choice.ids.shape if choice else "no choice", shape)
        if choice.passes > 1 and self._arch != _ROUTES_TWICE:
            raise self._unlike(row, f"{choice.passes} choices", "one")
        weights = None
        if self._has_weights:
            if choice.weights is None or choice.weights.size != n_tokens * row.top_k:
                raise self._unlike(row, f"weights of shape {None if choice.weights is None else choice.weights.shape}", shape)
            weights = choice.weights.reshape(shape).astype(np.float16)
        # An id out of range, a negative one included, is out of range as uint16 too, and the trace refuses it.
        return Call(row.layer, choice.ids.astype(np.uint16), weights, times.get(row.layer))

    def _unlike(self, row: TraceLayer, found: object, expected: object) -> BadInputError:
        return BadInputError(
            f"llama.cpp does not route layer {row.layer} of architecture {self._arch} as the model's metadata say, "
            "so it cannot be recorded",
            found=found,
            expected=expected,
        )


def _times(choices: dict[int, _Choice], ended_ns: int) -> dict[int, int]:
    """Time of each layer; `choices` are in the order in which they came."""
    came = [choice.came_ns for choice in choices.values()]
    return {
        layer: next_ns - choice.left_ns for (layer, choice), next_ns in zip(choices.items(), [*came[1:], ended_ns], strict=True)
    }


def _read(tensor: Tensor, dtype: type[np.generic], n_dims: int) -> np.ndarray:
    values = tensor.array(n_dims)
    if values.dtype != dtype:
        raise BadInputError(
            "llama.cpp made a router node of another type", tensor=tensor.name, found=values.dtype, expected=np.dtype(dtype)
        )
    return values
