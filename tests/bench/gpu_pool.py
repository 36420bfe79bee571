"""The slot pool's rows of `bench_gpu.py`: modes, sizes and profiles."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bel.formats.bundle import open_bundle
from bel.runtime.gpu_choice import choose
from bel.runtime.policies import parse_policy
from bel.runtime.pool_counters import PROMPT
from bel.runtime.pool_home import device_home
from bel.runtime.pool_model import PoolRun, open_pool
from bel.runtime.pool_options import PoolOptions

if TYPE_CHECKING:
    from bench_gpu import Bench, Case, Group, Ready

MODES = (("static", "static"), ("upload", "lru"), ("upload", "lfu-decay:0.98"), ("split", "lfu-decay:0.98"))


def pool(mode: str, policy: str, share: float, profile: str) -> Group:
    """A pool of one size, preloaded by a profile; it is loaded once for all rounds, so that its slots are warm."""

    @contextlib.contextmanager
    def group(bench: Bench) -> Iterator[Sequence[Case]]:
        from bench_gpu import Case

        bundle = open_bundle(bench.bundle)
        n_expert = max(layer.n_expert for layer in bundle.manifest.layers)
        options = PoolOptions(
            mode=mode,
            policy=parse_policy(policy),
            slots=round(share * n_expert),
            wanted=bench.orders[profile],
            n_threads=bench.n_pool_threads,
        )
        home = device_home(bench.engine, bench.device.address)
        # What llama.cpp has the CPU do is a row of a table: threads for that would only be in the way of the missing experts'.
        with open_pool(bench.engine, bundle, bench.sizes(1), options, home) as run:
            facts = {"profile": profile, "policy": policy, **_facts(run)}
            yield [Case(f"pool {mode}, {policy}, profile {profile}", share, lambda: _ready(run), facts)]

    group.__qualname__ = f"pool {mode} {policy} {share:.0%} {profile}"
    return group


@contextlib.contextmanager
def _ready(run: PoolRun) -> Iterator[Ready]:
    from bench_gpu import Hits, Ready

    run.context.clear()
    counters = run.pool.counters
    counters.phase[0] = PROMPT
    before = counters.decode

    def finish() -> Hits:
        now = counters.decode
        return Hits(now.hits - before.hits, now.missed - before.missed)

    yield Ready(run.context, finish, counters.begin_decode)


def _facts(run: PoolRun) -> dict[str, Any]:
    pool = run.pool
    costs = None if pool.costs is None else {"upload_us": pool.costs.upload_ns / 1e3, "compute_us": pool.costs.compute_ns / 1e3}
    return {"share": pool.share, "costs": costs, "slot_bytes": pool.bytes.slots, "stage_bytes": pool.bytes.stage}


def auto(share: float, workload: str) -> Group:
    """What `bel-run --gpu auto` with a plan would take, by the first tokens of the prompt."""

    @contextlib.contextmanager
    def group(bench: Bench) -> Iterator[Sequence[Case]]:
        from bench_gpu import Case

        bundle = open_bundle(bench.bundle)
        slots = round(share * max(layer.n_expert for layer in bundle.manifest.layers))
        policy = parse_policy("lfu-decay:0.98")
        options = PoolOptions("split", policy, slots=slots, wanted=bench.orders[workload], n_threads=bench.n_pool_threads)
        home = device_home(bench.engine, bench.device.address)
        with open_pool(bench.engine, bundle, bench.sizes(1), options, home) as run:
            ways = [("upload", policy), ("split", policy), ("static", parse_policy("static"))]
            tried = choose(run, bench.work.prompt, ways)
            facts = {"tried": [(way.mode, 1 / way.seconds) for way in tried], **_facts(run)}
            yield [Case(f"auto, profile {workload}: {tried[0].mode}", share, lambda: _ready(run), facts)]

    group.__qualname__ = f"pool auto {share:.0%} {workload}"
    return group


def groups(shares: Sequence[float], workload: str, others: Sequence[str]) -> list[Group]:
    """All modes with the workload's own profile, and the fixed set with the others'."""
    found = [pool(mode, policy, share, workload) for share in shares for mode, policy in MODES]
    found += [auto(share, workload) for share in shares]
    return found + [pool("static", "static", share, other) for share in shares for other in others]
