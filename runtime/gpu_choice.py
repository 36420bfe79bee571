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

from bel.runtime.policies import Policy, parse_policy
from bel.runtime.pool_model import PoolRun

WARM_TOKENS, TIMED_TOKENS = 8, 16
"""Tokens of each way: the first ones fill slots and wake threads."""


@dataclass(frozen=True, slots=True)
class Way:
    """A mode of the pool with a policy, and what a token took with it: the median of the timed ones, in seconds."""

    mode: str
    policy: str
    seconds: float


def choose(run: PoolRun, tokens: npt.NDArray[np.int32], ways: Sequence[tuple[str, Policy]]) -> list[Way]:
    """Try each of `ways` on `tokens` (n,), again from the start where there are too few; fastest first.

    The pool is left in the fastest way with slots as at its start, its context empty, and nothing of the trial counted.
    """
    given = [int(token) for token in tokens] or [0]
    trial = [given[i % len(given)] for i in range(WARM_TOKENS + TIMED_TOKENS)]
    tried = []
    for mode, policy in ways:
        run.use(mode, policy)
        run.context.clear()
        seconds = [_timed(run, token) for token in trial]
        tried.append(Way(mode, policy.name, statistics.median(seconds[WARM_TOKENS:])))
    tried.sort(key=lambda way: way.seconds)
    run.use(tried[0].mode, parse_policy(tried[0].policy))
    run.context.clear()
    run.pool.counters.reset()
    return tried


def _timed(run: PoolRun, token: int) -> float:
    began = time.perf_counter()
    run.context.decode([token])
    run.context.logits  # noqa: B018 - waits for the device
    return time.perf_counter() - began
