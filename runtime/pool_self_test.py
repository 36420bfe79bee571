"""Proof at start, on the model and the device at hand: slots with renamed experts compute what stock's layout computes.

The same tokens run twice.  Once every expert of a choice lies where stock llama.cpp has it, in a stack of all experts, and the
choice is left as it is.  Once they lie in slots, and the choice is renamed.  Every logit must be the same, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bel.formats.errors import MachineError
from bel.runtime.context import Context, ContextOptions, Observer
from bel.runtime.engine import Model
from bel.runtime.pool_graph import ChoiceObserver, LayerGraph
from bel.runtime.slot_memory import SLOT, STAGE, SlotMemory
from bel.runtime.tensor import Tensor

N_TOKENS = 3
_SIZES = ContextOptions(32, 32, 32, 1, n_outputs=1)


class EndingObserver(Observer, Protocol):
    """An observer that is told when a decode has ended."""

    def end(self) -> None:
        """It has."""


Contexts = Callable[[Model, ContextOptions], AbstractContextManager[Context]]
"""Makes a context of a model in which a pool serves."""


def observed(observer: EndingObserver) -> Contexts:
    """Contexts with that observer."""
    return lambda model, sizes: model.context(sizes, observer, observer.end)


def self_test(model: Model, graphs: Sequence[LayerGraph], memory: SlotMemory, slots: Contexts) -> None:
    """Run both and compare; `slots` makes a context of a pool with fresh slots.

    Raises MachineError where a logit differs, or is not a number.
    """

    def bring(i: int, ids: Tensor) -> None:
        """Put the experts of a choice where stock's layout has them, and let the choice be."""
        memory.point(i, STAGE)
        for expert in np.unique(ids.array(2)).tolist():
            memory.stage(i, expert)
        memory.wait()

    staged = ChoiceObserver(graphs, bring)
    expected = _logits(model, lambda model, sizes: model.context(sizes, staged))
    for i in range(len(graphs)):
        memory.point(i, SLOT)
    found = _logits(model, slots)
    if not np.isfinite(expected).all() or not np.array_equal(expected.view(np.uint32), found.view(np.uint32)):
        with np.errstate(all="ignore"):
            worst = float(np.abs(expected - found).max())
        raise MachineError(
            "the self-test of the slot pool failed: it does not compute what llama.cpp's own layout of the experts gives here",
            found=f"a largest difference of {worst:g} in the logits of {N_TOKENS} tokens",
            expected="none",
            hint="Run it without --gpu, and report the device, the model and this message",
        )


def _logits(model: Model, contexts: Contexts) -> npt.NDArray[np.float32]:
    """(N_TOKENS, n_vocab)."""
    rows = []
    with contexts(model, _SIZES) as context:
        for token in range(N_TOKENS):
            context.decode([token % model.n_vocab])
            rows.append(context.logits[0].copy())
    return np.stack(rows)
