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

WARM_TOKENS, TIMED_TOKENS = 24, 16
"""Tokens of each way.  The first ones fill slots, or llama.cpp's own cache, which begins empty, and wake threads.  As many for
each way, so that all are timed on the same tokens."""


@dataclass(frozen=True, slots=True)
class Way:
    """A mode of the pool with a policy, or llama.cpp's own cache, and what a token took: the median of the timed ones, in
    seconds."""

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


def trial_tokens(tokens: npt.NDArray[np.int32], n_ctx: int) -> list[int]:
    """What is tried: `tokens` (n,), again from the start where there are too few, and no more than a context has room for."""
    given = [int(token) for token in tokens] or [0]
    return [given[i % len(given)] for i in range(min(WARM_TOKENS + TIMED_TOKENS, n_ctx))]


def try_pool(run: PoolRun, trial: Sequence[int], ways: Sequence[tuple[str, Policy]]) -> list[Way]:
    """Try ways of a pool.  Counts and slots are left as the last one made them."""
    tried = []
    for mode, policy in ways:
        run.use(mode, policy)
        tried.append(Way(mode, policy.name, seconds_per_token(run.context, trial)))
    return tried


def seconds_per_token(context: Context, trial: Sequence[int]) -> float:
    """Compute tokens one by one, from the start; the median of the last."""
    context.clear()
    return statistics.median([_timed(context, token) for token in trial][-TIMED_TOKENS:])


def _timed(context: Context, token: int) -> float:
    began = time.perf_counter()
    context.decode([token])
    context.logits  # noqa: B018 - waits for the device
    return time.perf_counter() - began
