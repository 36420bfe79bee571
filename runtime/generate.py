"""Generating text: a prompt goes through the model, then one token at a time comes out, until something ends it."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bel.formats.errors import UsageError
from bel.runtime.sampling import Chooser

if TYPE_CHECKING:
    from bel.runtime.context import Context
    from bel.runtime.engine import Model

LENGTH, END_OF_TEXT, CONTEXT_FULL, INTERRUPTED = "length", "end_of_text", "context_full", "interrupted"
"""What a generation ended with."""


@dataclass(slots=True)
class Speed:
    """What was computed, and the time that it took.  The first token generated comes of the prompt's logits."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0


class Generation:
    """One prompt and what follows it.

    `n_positions`: positions that may be used, at most the context's.  `is_stopped` is asked between decodes: once it says yes
    nothing more is computed.  `ended` is "" while it runs.
    """

    def __init__(
        self,
        context: Context,
        chooser: Chooser,
        *,
        n_positions: int | None = None,
        ignore_end: bool = False,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._context, self._chooser, self._ignore_end = context, chooser, ignore_end
        self._is_stopped = is_stopped
        self._n_positions = min(context.n_ctx, n_positions or context.n_ctx)
        self.speed = Speed()
        self.ended = ""

    def prompt(self, tokens: npt.NDArray[np.integer[Any]]) -> None:
        """Compute a prompt (n,), at least one token.  Raises UsageError where it does not fit, and what `decode` raises."""
        if len(tokens) > self._n_positions:
            raise UsageError(
                f"the prompt does not fit into the context: it has {len(tokens)} tokens, the context {self._n_positions}",
                hint="Shorten the prompt, or give a larger --context",
            )
        step = self._context.n_batch
        for start in range(0, len(tokens), step):
            if self._is_stopped():
                self.ended = INTERRUPTED
                return
            part = tokens[start : start + step]
            began = time.perf_counter()
            self._context.decode(part)
            self.speed.prompt_seconds += time.perf_counter() - began
            self.speed.prompt_tokens += len(part)

    def tokens(self, n_predict: int) -> Iterator[int]:
        """The tokens that follow, each as soon as it is known; the token that ends a text is not among them."""
        made = 0
        while not self.ended:
            if made == n_predict:
                self.ended = LENGTH
                break
            token = next_token(self._context.model, self._chooser, self._context.logits[-1], ignore_end=self._ignore_end)
            if token is None:
                self.ended = END_OF_TEXT
                break
            yield token
            made += 1
            if made < n_predict:
                self._decode(token)

    def _decode(self, token: int) -> None:
        if self._is_stopped():
            self.ended = INTERRUPTED
        elif self._context.n_past >= self._n_positions:
            self.ended = CONTEXT_FULL
        else:
            began = time.perf_counter()
            self._context.decode([token])
            self.speed.decode_seconds += time.perf_counter() - began
            self.speed.decode_tokens += 1


def next_token(model: Model, chooser: Chooser, logits: npt.NDArray[np.float32], *, ignore_end: bool) -> int | None:
    """The token after logits (n_vocab,), or None where the text ends.  With `ignore_end` one that does not end it."""
    token = chooser.pick(logits)
    if not model.is_end(token):
        return token
    if not ignore_end:
        return None
    banned = logits.copy()
    while model.is_end(token):
        banned[token] = -np.inf
        token = chooser.pick(banned)
    return token


class TextStream:
    """Turns tokens into text, piece by piece, never cut inside a character.  `before` is the token in front of the first."""

    def __init__(self, model: Model, before: int) -> None:
        self._model, self._last = model, before
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that are complete with this token: often one word, sometimes nothing."""
        # Alone, a token at the beginning of a text loses its space (SentencePiece): so it is read behind the one before it.
        pair = self._model.detokenize([self._last, token])
        piece = pair[len(self._model.detokenize([self._last])) :]
        self._last = token
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """What is left: a replacement character where the text ends inside a character."""
        return self._decoder.decode(b"", final=True)
