"""A loaded bundle on a device in one of its ways: a pool of slots, or llama.cpp's own cache.

The device's memory does not do for both at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from types import TracebackType

import numpy as np
import numpy.typing as npt

from bel.formats.errors import MachineError, UsageError
from bel.runtime.context import Context
from bel.runtime.devices import Device
from bel.runtime.gpu_cache import Promise, cache_context, check_own_cache, fitting_cache, open_own_cache
from bel.runtime.gpu_choice import Trial, Way, choose, try_pool
from bel.runtime.policies import Policy, parse_policy
from bel.runtime.pool_costs import MissCosts
from bel.runtime.pool_loading import LoadedPool
from bel.runtime.pool_model import PoolRun, open_slots
from bel.runtime.run_options import AUTO, CACHE
from bel.runtime.stock_cache import CacheCounts
from bel.runtime.stock_gpu import StockGpuRun

CACHE_POLICY = "lru"
"""llama.cpp's own, of all layers of a group together."""


class GpuRun:
    """One way at a time: `pool` has slots, or `cache` is llama.cpp's own and `cache_bytes` its size; the other one is None.

    `way` was asked for.  For `auto`, `tried` is what was measured, fastest first, and `left_out` says of a way why it could not
    be.  `promise` is what may be taken of the device's memory; it is only looked after where `keeps_promise`.  Use it in a
    `with`.
    """

    def __init__(
        self, loaded: LoadedPool, device: Device, way: str, policy: Policy, promise: Promise, *, keeps_promise: bool
    ) -> None:
        self.loaded, self.device, self.way, self.policy, self.promise = loaded, device, way, policy, promise
        self.pool: PoolRun | None = None
        self.cache: StockGpuRun | None = None
        self.cache_bytes = 0
        self.tried: list[Way] = []
        self.left_out: dict[str, str] = {}
        self._keeps_promise = keeps_promise
        self._costs: MissCosts | None = None
        self._open = contextlib.ExitStack()
        self._used_at_end: int | None = None

    def __enter__(self) -> GpuRun:
        if self.way == CACHE:
            self.use_cache()
        else:
            self.use_pool(self.loaded.options.mode, self.loaded.options.policy)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def context(self) -> Context:
        """The one in force: another one after `choose`, and after each `use_`."""
        run = self.pool or self.cache
        assert run is not None, "a way is in force"
        return run.context

    @property
    def mode(self) -> str:
        """The way in force."""
        return CACHE if self.pool is None else self.pool.pool.mode

    def used_bytes(self) -> int:
        """What is used of the device's memory, or was before `finish`."""
        return self.promise.used_bytes() if self._used_at_end is None else self._used_at_end

    def use_pool(self, mode: str, policy: Policy) -> None:
        """Close what is open, and make slots as at the start."""
        self.close()
        options = dataclasses.replace(self.loaded.options, mode=mode, policy=policy)
        self.pool = self._open.enter_context(open_slots(self.loaded, options, self._costs))
        self._costs = self.pool.pool.costs or self._costs

    def use_cache(self) -> None:
        """Close what is open, and make an empty cache of llama.cpp's own.

        Raises MachineError and UsageError where it cannot be, would not pay, or does not keep the promise.
        """
        check_own_cache(self.loaded)
        self.close()
        sizes = cache_context(self.loaded)
        if not self.cache_bytes:
            self.cache_bytes = fitting_cache(self.loaded, self.device, sizes, self.promise if self._keeps_promise else None)
        self.cache = self._open.enter_context(open_own_cache(self.loaded, self.device, sizes, self.cache_bytes))

    def close(self) -> None:
        """Give the device the memory of the way in force.  A second call does nothing."""
        self.pool = self.cache = self._used_at_end = None
        self._open.close()

    def choose(self, tokens: npt.NDArray[np.int32]) -> None:
        """For `auto`: take the way that is fastest on these tokens, or an exact one that is nearly as fast.  Does nothing for a
        way that was asked for by name.

        The context is empty then, slots are as at the start, llama.cpp's own cache is empty, and nothing of it was counted.
        """
        if self.way != AUTO or self.tried or self.pool is None or not self.pool.can_change:
            return
        trial = Trial(tokens, self.context.n_ctx)
        ways = [("upload", self.policy), ("split", self.policy)]
        if self.loaded.options.wanted:
            ways.append(("static", parse_policy("static")))
        tried = try_pool(self.pool, trial, ways)
        self.tried = sorted([*tried, *self._try_cache(trial)], key=lambda way: way.seconds)
        self._take(choose(self.tried))

    def _try_cache(self, trial: Trial) -> list[Way]:
        """The way, if it can be.  Behind it the pool may be closed."""
        try:
            self.use_cache()
            return [Way(CACHE, CACHE_POLICY, trial.seconds_per_token(self.context))]
        except (MachineError, UsageError) as error:
            self.left_out[CACHE] = str(error)
            return []

    def _take(self, way: Way) -> None:
        if way.mode == CACHE:
            self.use_cache()
        elif self.pool is None:
            self.use_pool(way.mode, parse_policy(way.policy))
        else:
            self.pool.use(way.mode, parse_policy(way.policy))
            self.context.clear()
            self.reset_counters()

    def reset_counters(self) -> None:
        """Nothing has been counted.  llama.cpp's own cache counts on: it tells at its end alone."""
        if self.pool is not None:
            self.pool.pool.counters.reset()
            if self.pool.pool.tier is not None:
                self.pool.pool.tier.counters.reset()

    def begin_decode(self) -> None:
        """Count what follows as decode.  llama.cpp's own cache goes by the size of a batch instead."""
        if self.pool is not None:
            self.pool.pool.counters.begin_decode()

    def finish(self) -> CacheCounts | None:
        """End a context with llama.cpp's own cache, which only then tells its counts; None without.  Nothing is computed
        behind it."""
        if self.cache is None:
            return None
        self._used_at_end = self.used_bytes()
        return self.cache.finish()
