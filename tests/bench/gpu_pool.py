"""The rows of `bench_gpu.py` that run a bundle: the slot pool by modes, sizes and profiles, llama.cpp's cache, and `auto`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from gpu_cases import SHARES, Bench, Case, Group, Hits, Ready

from bel.formats.bundle import open_bundle
from bel.formats.errors import MachineError
from bel.runtime.devices import free_device_bytes
from bel.runtime.gpu_cache import Promise, cache_context, check_own_cache, open_own_cache, own_cache_sizes
from bel.runtime.gpu_run import GpuRun
from bel.runtime.policies import parse_policy
from bel.runtime.pool_counters import PROMPT
from bel.runtime.pool_home import device_home
from bel.runtime.pool_loading import LoadedPool, load_pool
from bel.runtime.pool_model import PoolRun, open_pool
from bel.runtime.pool_options import N_AHEAD, PoolOptions, expert_bytes
from bel.runtime.run_options import AUTO
from bel.runtime.stock_cache import CacheCounts

MODES = (("static", "static"), ("upload", "lru"), ("upload", "lfu-decay:0.98"), ("split", "lfu-decay:0.98"))


def pool(mode: str, policy: str, share: float, profile: str, n_ahead: int = N_AHEAD) -> Group:
    """A pool of one size, preloaded by a profile; it is loaded once for all rounds, so that its slots are warm.  `n_ahead`
    experts are brought ahead."""

    @contextlib.contextmanager
    def group(bench: Bench) -> Iterator[Sequence[Case]]:
        bundle = open_bundle(bench.bundle)
        n_expert = max(layer.n_expert for layer in bundle.manifest.layers)
        options = PoolOptions(
            mode=mode,
            policy=parse_policy(policy),
            slots=round(share * n_expert),
            wanted=bench.orders[profile],
            n_threads=bench.n_pool_threads,
            n_ahead=n_ahead,
        )
        home = device_home(bench.engine, bench.device.address)
        # What llama.cpp has the CPU do is a row of a table: threads for that would only be in the way of the missing experts'.
        with open_pool(bench.engine, bundle, bench.sizes(1), options, home) as run:
            facts = {"profile": profile, "policy": policy, "n_ahead": n_ahead, **_facts(run)}
            ahead = "" if n_ahead == N_AHEAD else f", {n_ahead} ahead"
            yield [Case(f"pool {mode}, {policy}, profile {profile}{ahead}", share, lambda: _ready(run), facts)]

    group.__qualname__ = f"pool {mode} {policy} {share:.0%} {profile} ahead {n_ahead}"
    return group


@contextlib.contextmanager
def _ready(run: PoolRun) -> Iterator[Ready]:
    run.context.clear()
    counters = run.pool.counters
    counters.phase[0] = PROMPT
    before = counters.decode

    def finish() -> Hits:
        now = counters.decode
        ahead = (now.ahead_bytes - before.ahead_bytes) // expert_bytes(run.pool.layers[0])
        return Hits(now.hits - before.hits, now.missed - before.missed, now.in_time - before.in_time, ahead)

    yield Ready(run.context, finish, counters.begin_decode)


def _facts(run: PoolRun) -> dict[str, Any]:
    pool = run.pool
    costs = None if pool.costs is None else {"upload_us": pool.costs.upload_ns / 1e3, "compute_us": pool.costs.compute_ns / 1e3}
    return {"share": pool.share, "costs": costs, "slot_bytes": pool.bytes.slots, "stage_bytes": pool.bytes.stage}


def own_cache() -> Group:
    """llama.cpp's own cache over the bundle's experts in pinned host memory, at the sizes of stock's rows."""

    @contextlib.contextmanager
    def group(bench: Bench) -> Iterator[Sequence[Case]]:
        home = device_home(bench.engine, bench.device.address)
        options = PoolOptions(n_threads=bench.n_threads)
        with load_pool(bench.engine, open_bundle(bench.bundle), bench.sizes(1), options, home) as loaded:
            check_own_cache(loaded)
            sizes = own_cache_sizes(loaded)
            cases = []
            for share in SHARES:
                size = sizes.size_for_share(share)
                facts = {"cache_bytes": size, "slots": sum(sizes.slots(size)), "threads": options.n_threads}
                cases.append(Case("cache of a bundle", share, functools.partial(_cache_case, bench, loaded, size), facts))
            yield cases

    group.__qualname__ = "cache bundle"
    return group


@contextlib.contextmanager
def _cache_case(bench: Bench, loaded: LoadedPool, cache_bytes: int) -> Iterator[Ready]:
    with open_own_cache(loaded, bench.device, cache_context(loaded), cache_bytes) as run:
        expected = sum(own_cache_sizes(loaded).slots(cache_bytes))
        if run.slots != expected:
            raise MachineError(
                "llama.cpp makes another number of slots of this size than stock_cache.py computes",
                found=run.slots,
                expected=expected,
            )
        yield Ready(run.context, lambda: _own_hits(run.finish()))


def _own_hits(counts: CacheCounts | None) -> Hits:
    if counts is None or not counts.hits + counts.misses:
        raise MachineError("llama.cpp's own cache was made, and counted nothing: it was not used", found=counts)
    return Hits(counts.hits, counts.misses)


def auto(share: float, workload: str) -> Group:
    """What `bel-run --gpu auto` with a plan would take, by the first tokens of the prompt."""

    @contextlib.contextmanager
    def group(bench: Bench) -> Iterator[Sequence[Case]]:
        bundle = open_bundle(bench.bundle)
        slots = round(share * max(layer.n_expert for layer in bundle.manifest.layers))
        policy = parse_policy("lfu-decay:0.98")
        options = PoolOptions("split", policy, slots=slots, wanted=bench.orders[workload], n_threads=bench.n_pool_threads)
        home = device_home(bench.engine, bench.device.address)
        before = free_device_bytes(bench.engine, bench.device)
        promise = Promise(before, lambda: before - free_device_bytes(bench.engine, bench.device))
        with (
            load_pool(bench.engine, bundle, bench.sizes(1), options, home) as loaded,
            GpuRun(loaded, bench.device, AUTO, policy, promise, keeps_promise=True) as run,
        ):
            run.choose(bench.work.prompt)
            facts = {"tried": [(way.mode, 1 / way.seconds) for way in run.tried], "left_out": run.left_out}
            facts |= {"cache_bytes": run.cache_bytes} if run.pool is None else _facts(run.pool)
            yield [Case(f"auto, profile {workload}: {run.mode}", share, lambda: _ready_run(run), facts)]

    group.__qualname__ = f"pool auto {share:.0%} {workload}"
    return group


@contextlib.contextmanager
def _ready_run(run: GpuRun) -> Iterator[Ready]:
    """Of a pool the slots are warm, as in its other rows; a cache is made anew, for it tells its counts when it is freed."""
    if run.pool is not None:
        with _ready(run.pool) as ready:
            yield ready
        return
    run.use_cache()
    yield Ready(run.context, lambda: _own_hits(run.finish()))


def groups(shares: Sequence[float], workload: str, others: Sequence[str], ahead: Sequence[int]) -> list[Group]:
    """llama.cpp's own cache, all modes with the workload's own profile, `auto`, the fixed set with the others' profiles, and
    other numbers of experts `ahead`."""
    found = [own_cache()]
    found += [pool(mode, policy, share, workload) for share in shares for mode, policy in MODES]
    found += [auto(share, workload) for share in shares]
    found += [pool("static", "static", share, other) for share in shares for other in others]
    return found + [pool("upload", "lfu-decay:0.98", share, workload, count) for share in shares for count in ahead]
