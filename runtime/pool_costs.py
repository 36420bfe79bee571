"""What a missing expert costs on this machine: to bring it to the home, or to compute it on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bel.runtime.pool_experts import CpuExperts
from bel.runtime.pool_graph import LayerGraph
from bel.runtime.slot_memory import SlotMemory

_MOST_LAYERS = 16  # a layer is a moment, but a model may have a hundred
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class MissCosts:
    """Nanoseconds for one expert, where half of a token's experts are met in this way at once."""

    upload_ns: float
    compute_ns: float

    @property
    def share(self) -> float:
        """Of a token's misses those to upload: the CPU computes the others meanwhile, and both are done at the same time."""
        return self.compute_ns / (self.compute_ns + self.upload_ns)


def measure_costs(graphs: Sequence[LayerGraph], memory: SlotMemory, cpu: CpuExperts) -> MissCosts:
    """Try both ways, on experts of several layers: what was just used would be in the CPU's caches.

    It writes to the stage, which nothing reads before it is written anew.  It runs in a thread of its own: OpenMP keeps the
    helpers of a thread as long as that lives, and they would be too many beside those of the thread that computes experts.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_measure, graphs, memory, cpu).result()


def _measure(graphs: Sequence[LayerGraph], memory: SlotMemory, cpu: CpuExperts) -> MissCosts:
    uploads, computed = [], []
    for round_ in range(_ROUNDS):
        for i, graph in enumerate(graphs[:_MOST_LAYERS]):
            count = max(1, graph.top_k // 2)
            experts = [(round_ * count + n) % graph.n_expert for n in range(count)]
            began = time.perf_counter_ns()
            for expert in experts:
                memory.stage(i, expert)
            memory.wait()
            uploads.append((time.perf_counter_ns() - began) / count)
            began = time.perf_counter_ns()
            cpu.compute(i, experts)
            computed.append((time.perf_counter_ns() - began) / count)
    return MissCosts(max(1.0, statistics.median(uploads)), max(1.0, statistics.median(computed)))
