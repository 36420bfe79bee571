"""Choosing the next token from logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bel.formats.errors import BadInputError


class Chooser:
    """Picks the next token: the best at temperature 0, else one drawn from the softmax of logits / temperature."""

    def __init__(self, temperature: float, seed: int) -> None:
        self._temperature, self._random = temperature, np.random.default_rng(seed)

    def pick(self, logits: npt.NDArray[np.float32]) -> int:
        """The next token for the logits (n_vocab,) of the last one.  Raises BadInputError where they are not numbers."""
        best = int(np.argmax(logits))
        if not np.isfinite(logits[best]):
            raise BadInputError("the model's logits are not finite: its weights are damaged, or not what they claim to be")
        if self._temperature == 0:
            return best
        sums = np.cumsum(np.exp((logits.astype(np.float64) - logits[best]) / self._temperature))
        return int(np.searchsorted(sums, self._random.random() * sums[-1], side="right"))
