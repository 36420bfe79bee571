"""What the router chose, read out of llama.cpp's graph as it stands, for two runs to be compared.

Node names: `build_moe_ffn` in src/llama-graph.cpp of llama.cpp build 11549.  The choice of layer L is the node
`ffn_moe_topk-L`, int32 with ne = [k, rows]; a decode of several ubatches, or a layer that routes twice, has several of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bel.formats.errors import MachineError
from bel.runtime.tensor import Tensor

_CHOICE = b"ffn_moe_topk-"


@dataclass(frozen=True, slots=True)
class Choice:
    """One layer's choice for one ubatch: `ids` (rows, k) uint16, in slot order."""

    layer: int
    ids: npt.NDArray[np.uint16]


class ChoiceObserver:
    """Keeps every choice of the graphs that it sees; `take` gives them in the order of computation."""

    def __init__(self) -> None:
        self._choices: list[Choice] = []

    def ask(self, tensor: Tensor) -> bool:
        """Whether the node is a choice."""
        name = tensor.raw_name
        return name.startswith(_CHOICE) and name.removeprefix(_CHOICE).isdigit()  # there are "ffn_moe_topk-0 (copy)" too

    def seen(self, tensor: Tensor) -> None:
        """Keep a choice.  Raises MachineError for one that is not of small integers."""
        ids = tensor.array(2)
        if ids.dtype != np.int32 or (ids < 0).any() or (ids > np.iinfo(np.uint16).max).any():
            raise MachineError("llama.cpp chose an expert that cannot exist", tensor=tensor.name)
        self._choices.append(Choice(int(tensor.raw_name.removeprefix(_CHOICE)), ids.astype(np.uint16)))

    def take(self) -> list[Choice]:
        """The choices since the last `take`; nothing of them is kept."""
        choices, self._choices = self._choices, []
        return choices
