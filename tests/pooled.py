"""Running a slot pool in tests, with the CPU in the part of the GPU, beside stock llama.cpp on the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bel.formats.bundle import open_bundle
from bel.runtime.context import Context, ContextOptions
from bel.runtime.engine import Engine
from bel.runtime.policies import parse_policy
from bel.runtime.pool_counters import PoolCounters
from bel.runtime.pool_home import Home, cpu_home
from bel.runtime.pool_model import Pool, open_pool
from bel.runtime.pool_options import PoolOptions

Logits = npt.NDArray[np.float32]
SIZES = ContextOptions(512, 512, 512, 1)


@dataclass(frozen=True, slots=True)
class Pooled:
    """The logits (tokens, n_vocab) of a run, and its pool, whose counters are final."""

    logits: Logits
    pool: Pool

    @property
    def counters(self) -> PoolCounters:
        return self.pool.counters


def run_tokens(
    context: Context, n_prompt: int, n_decode: int, all_logits: bool, counters: PoolCounters | None = None
) -> Logits:
    """A random prompt at once and random tokens one by one."""
    random = np.random.default_rng(n_prompt)
    rows = []
    context.decode(random.integers(0, context.model.n_vocab, n_prompt), all_logits=all_logits)
    rows.append(context.logits.copy())
    if counters is not None:
        counters.begin_decode()
    for token in random.integers(0, context.model.n_vocab, n_decode):
        context.decode([token])
        rows.append(context.logits.copy())
    return np.concatenate(rows)


@cache
def stock(source: Path, n_prompt: int, n_decode: int, sizes: ContextOptions = SIZES, all_logits: bool = True) -> Logits:
    """What stock llama.cpp computes."""
    with Engine.open().load(source) as model, model.context(sizes) as context:
        return run_tokens(context, n_prompt, n_decode, all_logits)


def pool_options(bundle: Path, mode: str, policy: str = "lru", **fields: Any) -> PoolOptions:
    """Options with every expert wanted, in the order of the ids."""
    wanted = {x.layer: range(x.n_expert) for x in open_bundle(bundle).manifest.layers}
    name = "static" if mode == "static" else policy
    return PoolOptions(**{"mode": mode, "policy": parse_policy(name), "wanted": wanted, **fields})


def pooled(
    bundle: Path,
    options: PoolOptions,
    n_prompt: int,
    n_decode: int,
    sizes: ContextOptions = SIZES,
    all_logits: bool = True,
    home: Home | None = None,
) -> Pooled:
    """The same tokens through a pool."""
    engine = Engine.open()
    with open_pool(engine, open_bundle(bundle), sizes, options, home or cpu_home(engine)) as run:
        logits = run_tokens(run.context, n_prompt, n_decode, all_logits, run.pool.counters)
        return Pooled(logits, run.pool)


def largest_difference(a: Logits, b: Logits) -> float:
    assert a.shape == b.shape
    assert np.isfinite(a).all()
    return float(np.abs(a - b).max())
