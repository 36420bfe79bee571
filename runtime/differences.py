"""Where a run differs from the one that it must equal, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bel.runtime.choices import Choice

PROMPT, ROUTER, LOGITS, TOKEN = "prompt", "router", "logits", "token"
"""What may differ: the tokens of a prompt's text, a choice of experts, logits, the best next token."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A difference: `position` of the token (from 0 in its sequence) behind which it shows, `layer` of a choice of experts.

    `what` is one of the kinds above, `found` what the bundle has and `expected` what stock llama.cpp has.
    """

    prompt: str
    position: int
    layer: int | None
    what: str
    found: str
    expected: str


class Differences:
    """Counts what is compared and remembers the first difference.

    `max_logit`: the largest absolute difference of two logits; infinite where one of them is not a number.
    """

    def __init__(self) -> None:
        self.n_tokens = self.n_router_records = self.n_logits = 0
        self.max_logit = 0.0
        self.first: Mismatch | None = None

    def prompt(self, name: str, found: npt.NDArray[np.int32], expected: npt.NDArray[np.int32]) -> None:
        """Compare the tokens (n,) of a prompt."""
        if not np.array_equal(found, expected):
            self._note(
                Mismatch(name, _first_unequal(found, expected), None, PROMPT, f"{len(found)} tokens", f"{len(expected)}")
            )

    def choices(self, name: str, position: int, found: Sequence[Choice], expected: Sequence[Choice]) -> None:
        """Compare all choices of one decode that began at a position; each row of each choice is a record."""
        layers, expected_layers = [x.layer for x in found], [x.layer for x in expected]
        if layers != expected_layers:
            layer = expected_layers[_first_unequal(layers, expected_layers) :] or layers[len(expected_layers) :]
            self._note(Mismatch(name, position, layer[0], ROUTER, f"layers {layers}", f"layers {expected_layers}"))
            return
        rows = _rows_of_ubatches(expected)
        for mine, theirs, (before, count) in zip(found, expected, rows, strict=True):
            # The last layer of a decode that wants few logits has the last rows only.
            self._choice(name, position + before + count - len(theirs.ids), mine, theirs)

    def _choice(self, name: str, position: int, found: Choice, expected: Choice) -> None:
        self.n_router_records += len(expected.ids)
        if np.array_equal(found.ids, expected.ids):
            return
        if found.ids.shape != expected.ids.shape:
            shapes = f"{found.ids.shape} ids", f"{expected.ids.shape} ids"
            self._note(Mismatch(name, position, found.layer, ROUTER, *shapes))
            return
        row = int(np.flatnonzero((found.ids != expected.ids).any(axis=1))[0])
        rows = f"experts {found.ids[row].tolist()}", f"experts {expected.ids[row].tolist()}"
        self._note(Mismatch(name, position + row, found.layer, ROUTER, *rows))

    def logits(self, name: str, position: int, found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
        """Compare the logits (n_vocab,) behind a position: their bits, so 0.0 and -0.0 differ, by 0."""
        self.n_logits += len(expected)
        if len(found) != len(expected):
            self.max_logit = math.inf
            self._note(Mismatch(name, position, None, LOGITS, f"{len(found)} logits", f"{len(expected)}"))
            return
        differing = np.flatnonzero(found.view(np.uint32) != expected.view(np.uint32))
        if not len(differing):
            return
        first = int(differing[0])
        self._note(Mismatch(name, position, None, LOGITS, f"{found[first]!s} for token {first}", f"{expected[first]!s}"))
        distances = np.abs(found[differing].astype(np.float64) - expected[differing].astype(np.float64))
        worst = float(distances.max())
        self.max_logit = math.inf if math.isnan(worst) else max(self.max_logit, worst)

    def token(self, name: str, position: int, found: int, expected: int) -> None:
        """Compare the best token behind a position."""
        self.n_tokens += 1
        if found != expected:
            self._note(Mismatch(name, position, None, TOKEN, f"token {found}", f"token {expected}"))

    def _note(self, mismatch: Mismatch) -> None:
        self.first = self.first or mismatch


def _first_unequal(a: Sequence[int] | npt.NDArray[np.int32], b: Sequence[int] | npt.NDArray[np.int32]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _rows_of_ubatches(choices: Sequence[Choice]) -> list[tuple[int, int]]:
    """For each choice of a decode the rows of the ubatches before its own, and those of its own.

    A graph computes its layers in ascending order, so a new ubatch begins where the layers do.
    """
    has_one_layer = len({choice.layer for choice in choices}) == 1
    places: list[tuple[int, int]] = []
    before = count = 0
    previous = -1
    for choice in choices:
        if choice.layer < previous or has_one_layer or previous < 0:
            before, count = before + count, len(choice.ids)
        previous = choice.layer
        places.append((before, count))
    return places
