"""Which experts the next layer will choose, guessed from what this layer's router saw.

The residual stream changes little from one layer to the next, so the next layer's router, applied to this layer's input
instead of its own, ranks most of the right experts first (RUNTIME.md of the design measured 74 % of the choices).  A guess
decides what is read early, never what is computed.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bel.runtime.llama_abi import TYPE_F32
from bel.runtime.tensor import Tensor

_MOST_STEPS = 10
"""From a choice back to the router's product: argsort, probabilities, biases and masks are between them."""


@dataclass(frozen=True, slots=True)
class _Router:
    """A layer's router: `gate` (n_expert, n_embd) and `norm` (n_embd,) of the norm before it, float32, where they lie."""

    gate: npt.NDArray[np.float32]
    norm: npt.NDArray[np.float32] | None


class NextExperts:
    """Learns each layer's router as its choices pass by.  Layers are places in the bundle's order."""

    def __init__(self) -> None:
        self._routers: dict[int, _Router | None] = {}
        self._factors: dict[tuple[int, int], npt.NDArray[np.float32] | None] = {}
        self._place = 0
        self._values: npt.NDArray[np.float32] | None = None

    def see(self, topk: Tensor, place: int) -> None:
        """Look at the choice `topk` of one row, in the layer at `place`: `guess` starts from it while it is computed."""
        self._place, self._values = place, None
        product = _product(topk)
        source = product.src(1) if product is not None else None
        if product is None or source is None or source.type_id != TYPE_F32 or not source.address:
            return
        if place not in self._routers:
            self._routers[place] = _router(product, source)
        router = self._routers[place]
        if router is not None:
            self._values = _floats(source, (router.gate.shape[1],))

    def guess(self, following: int, count: int) -> Sequence[int]:
        """The `count` likeliest experts of the layer at `following`, likeliest first, from the choice that was seen last.

        Empty where a router is of a kind that is not understood, or was not met yet.
        """
        here, there = self._routers.get(self._place), self._routers.get(following)
        if self._values is None or here is None or there is None or here.gate.shape[1] != there.gate.shape[1]:
            return ()
        factor = self._factor(self._place, here, following, there)
        with np.errstate(all="ignore"):
            # einsum, not BLAS: its threads would fight llama.cpp's for the cores
            scores = np.einsum("ij,j->i", there.gate, self._values if factor is None else self._values * factor)
        best = np.argsort(-scores, kind="stable")[:count]
        chosen: list[int] = best.tolist()
        return chosen

    def _factor(self, place: int, here: _Router, following: int, there: _Router) -> npt.NDArray[np.float32] | None:
        """What turns this layer's normed input into the next one's, as if the stream did not change between them."""
        key = (place, following)
        if key not in self._factors:
            both = here.norm is not None and there.norm is not None
            with np.errstate(all="ignore"):
                self._factors[key] = there.norm / here.norm if both else None  # type: ignore[operator]
        return self._factors[key]


def _product(topk: Tensor) -> Tensor | None:
    """The router's matrix product, from which a choice was made."""
    tensor: Tensor | None = topk
    for _ in range(_MOST_STEPS):
        if tensor is None or tensor.is_product:
            return tensor
        tensor = tensor.src(0)
    return None


def _router(product: Tensor, source: Tensor) -> _Router | None:
    gate = product.src(0)
    if gate is None or gate.type_id != TYPE_F32 or not gate.address or gate.nb[1] != 4 * gate.ne[0]:
        return None
    n_embd, n_expert = gate.ne[:2]
    norm = source.src(1)
    is_norm = norm is not None and norm.type_id == TYPE_F32 and norm.ne == (n_embd, 1, 1, 1) and bool(norm.address)
    return _Router(_floats(gate, (n_expert, n_embd)), _floats(norm, (n_embd,)) if norm is not None and is_norm else None)


def _floats(tensor: Tensor, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """A tensor's values where they lie."""
    memory = (ctypes.c_float * math.prod(shape)).from_address(tensor.address)
    return np.frombuffer(memoryview(memory), np.float32).reshape(shape)
