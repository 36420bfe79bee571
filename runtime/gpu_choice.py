"""Which way to meet misses on a GPU is fastest here: every way is tried on the first tokens of the work itself.

How fast a miss is uploaded or computed, and how many there are, depends on the machine, the model, the slots and the text; so a
prediction from constants is replaced by a short measurement.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bel.runtime.context import Context
from bel.runtime.policies import Policy
from bel.runtime.pool_model import PoolRun

WARM_TOKENS = 24
"""Of each way, before what counts: they fill slots, or llama.cpp's own cache, which begins empty, and wake threads."""
LEAST_TIMED, MOST_TIMED = 16, 128
"""Tokens that count.  Of 16 one way was taken for another that was a tenth faster over 200 tokens (one H200)."""
TIMED_SECONDS = 1.0
"""Once the first way's tokens took so long, no more than the least number are timed; the others get as many."""
SLOWEST = 0.05
"""So many of the tokens, the slowest, do not count: something else on the machine had its turn."""


@dataclass(frozen=True, slots=True)
class Way:
    """A mode of the pool with a policy, or llama.cpp's own cache, and what a token took, in seconds."""

    mode: str
    policy: str
    seconds: float


EXACT = ("upload", "cache")
"""Ways whose logits are those of llama.cpp with everything on the GPU."""
NEARLY = 0.05
"""By so much of the fastest way's time an exact one may be slower and is still taken."""


def choose(tried: Sequence[Way]) -> Way:
    """The way to take of those that were tried, fastest first: the fastest, or an exact one that is nearly as fast."""
    exact = (way for way in tried if way.mode in EXACT and way.seconds <= (1 + NEARLY) * tried[0].seconds)
    return next(exact, tried[0])


class Trial:
    """What is tried: `tokens` (n,), and from their end on what the model itself goes on with; no more than a context has room
    for.  Every way computes the same."""

    def __init__(self, tokens: npt.NDArray[np.int32], n_ctx: int) -> None:
        self.tokens = [int(token) for token in tokens] or [0]
        self._most = min(WARM_TOKENS + MOST_TIMED, n_ctx)
        self._is_first = True

    def seconds_per_token(self, context: Context) -> float:
        """Compute the tokens one by one, from the start."""
        context.clear()
        seconds: list[float] = []
        while len(seconds) < self._most and not (self._is_first and _is_enough(seconds)):
            seconds.append(_timed(context, self._token(len(seconds), context)))
        self._most, self._is_first = len(seconds), False
        return usual(_that_count(seconds))

    def _token(self, n: int, context: Context) -> int:
        if n == len(self.tokens):
            self.tokens.append(int(context.logits[-1].argmax()))
        return self.tokens[n]


def _that_count(seconds: Sequence[float]) -> Sequence[float]:
    """Those behind the warm-up; of few tokens the last ones."""
    return seconds[min(WARM_TOKENS, max(0, len(seconds) - LEAST_TIMED)) :]


def _is_enough(seconds: Sequence[float]) -> bool:
    timed = seconds[WARM_TOKENS:]
    return len(timed) >= LEAST_TIMED and sum(timed) >= TIMED_SECONDS


def usual(seconds: Sequence[float]) -> float:
    """The mean without the slowest of them.  Not the median: a token that misses more than others is a part of the work."""
    return statistics.fmean(sorted(seconds)[: len(seconds) - int(SLOWEST * len(seconds))])


def try_pool(run: PoolRun, trial: Trial, ways: Sequence[tuple[str, Policy]]) -> list[Way]:
    """Try ways of a pool.  Counts and slots are left as the last one made them."""
    tried = []
    for mode, policy in ways:
        run.use(mode, policy)
        tried.append(Way(mode, policy.name, trial.seconds_per_token(run.context)))
    return tried


def _timed(context: Context, token: int) -> float:
    began = time.perf_counter()
    context.decode([token])
    context.logits  # noqa: B018 - waits for the device
    return time.perf_counter() - began
