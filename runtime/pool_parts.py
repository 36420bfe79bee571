"""What a callback of either kind works with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bel.runtime.pool_counters import PoolCounters
from bel.runtime.pool_experts import CpuExperts
from bel.runtime.pool_graph import LayerGraph
from bel.runtime.pool_hosts import HostExperts
from bel.runtime.pool_layers import LayerSlots
from bel.runtime.slot_memory import SlotMemory


@dataclass(frozen=True, slots=True)
class PoolParts:
    """A pool: `graphs` and `layers` go together.  `cpu` computes missing experts, None where all of them are uploaded.

    `mode` and `share` are those of `pool_step.plan_call`.
    """

    graphs: Sequence[LayerGraph]
    layers: Sequence[LayerSlots]
    hosts: HostExperts
    memory: SlotMemory
    cpu: CpuExperts | None
    counters: PoolCounters
    mode: int
    share: float
