"""A slot pool over a host memory that does not hold all experts: how one is asked for, and its tier."""

from __future__ import annotations

from typing import Any

from bel.runtime.policies import parse_policy
from bel.runtime.pool_model import PoolRun
from bel.runtime.pool_options import PoolOptions
from bel.runtime.pool_tiers import HostTier
from pooled import Pooled

POLICIES = ("lru", "lfu-decay:0.98")


def options(slots: int, policy: str = "lru", **fields: Any) -> PoolOptions:
    return PoolOptions(policy=parse_policy(policy), slots=slots, **fields)


def tier_of(run: Pooled | PoolRun) -> HostTier:
    assert run.pool.tier is not None
    return run.pool.tier
