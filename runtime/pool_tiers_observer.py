"""The stops of a graph whose experts stand in three tiers.

A read from a disk takes a millisecond, so that the hundred microseconds of plain Python at each layer do not matter.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bel.runtime.pool_abi import PoolAbi
from bel.runtime.pool_counters import MOVED_BYTES, STAGED_BYTES, UPLOADED_BYTES
from bel.runtime.pool_observer import PoolObserver
from bel.runtime.pool_parts import PoolParts
from bel.runtime.pool_tiers import TierMover
from bel.runtime.tensor import Tensor


class TierObserver(PoolObserver):
    """Observes the graphs of one context, and has `mover` meet the misses: all of them are uploaded."""

    def __init__(self, abi: PoolAbi, parts: PoolParts, mover: TierMover) -> None:
        super().__init__(abi, parts)
        self._mover = mover

    def _stops_behind(self, i: int, rows: int) -> bool:
        """Never: the mover fills the stage, once it knows what stays in host memory."""
        del i, rows
        return False

    def _meet(self, i: int, topk: Tensor, ids: npt.NDArray[np.uint16]) -> None:
        is_staged = len(ids) > 1
        plan = self._mover.serve(i, ids)
        self._count(len(plan.distinct), plan.missed, 0, is_staged)
        self._point(i, is_staged)
        size = sum(place.part.stride_bytes for place in self._memory.parts[i])
        self._add(STAGED_BYTES if is_staged else UPLOADED_BYTES, plan.missed * size)
        staged = len({*(expert for expert, _ in plan.hits if is_staged), *(demotion.expert for demotion in plan.demoted)})
        self._add(MOVED_BYTES, (staged + len(plan.loads) * is_staged) * size)
        if not is_staged:
            assert plan.slots.min() >= 0, "a product would read in front of the slots"
            self._rename(topk, plan.slots)
