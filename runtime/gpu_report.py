"""What is said of a run with a GPU: how it was loaded, and what it did."""

from __future__ import annotations

from statistics import median_low
from typing import Any

from bel.formats.units import format_bytes
from bel.runtime.generate import Speed
from bel.runtime.gpu_run import CACHE_POLICY, GpuRun
from bel.runtime.pool_counters import PoolCounts
from bel.runtime.pool_model import PoolRun
from bel.runtime.stock_cache import CacheCounts
from bel.runtime.stock_gpu import StockGpuRun
from bel.runtime.tier_counters import TierCounts


def gpu_lines(run: GpuRun) -> list[str]:
    """A line of the slots, one of the memory, one of the way and why it was taken, and what else is to be known of it."""
    lines = _cache_lines(run, run.cache) if run.cache is not None else _pool_lines(run, run.pool)
    lines.append(f"way {run.mode}: {_why(run)}")
    lines += [f"way {way} was left out: {why}" for way, why in run.left_out.items()]
    if run.mode in ("split", "static"):
        lines.append(f"way {run.mode} computes on the CPU too, whose last bits differ from the GPU's; upload gives the GPU's")
    return lines


def _pool_lines(run: GpuRun, opened: PoolRun | None) -> list[str]:
    assert opened is not None, "one of the two is open"
    pool = opened.pool
    counts, most = list(pool.counts), [layer.n_expert for layer in pool.layers]
    spread = f"{min(counts)}/{median_low(counts)}/{max(counts)} of {max(most)}"
    held = "all experts"
    if pool.tier is not None:
        held = (
            f"{sum(pool.tier.counts)} experts that have no slot ({pool.tier.kind}; the others are read by {pool.tier.reader})"
        )
    return [
        f"{pool.home}: {len(counts)} layers, slots per layer (min/median/max) {spread}: {_share(sum(counts), sum(most))} in "
        f"{format_bytes(pool.bytes.slots)}; preloaded {format_bytes(pool.preloaded_bytes)}; policy {pool.policy}",
        f"memory of {pool.home}: {format_bytes(run.used_bytes())} in all, {format_bytes(pool.bytes.slots)} for slots and "
        f"{format_bytes(pool.bytes.stage)} for a layer's stage; {held} in {_host_memory(run)}",
    ]


def _cache_lines(run: GpuRun, cache: StockGpuRun) -> list[str]:
    home, most = run.loaded.home.name, sum(layer.n_expert for layer in run.loaded.layers)
    return [
        f"{home}: {len(run.loaded.layers)} layers, llama.cpp's own cache: {_share(cache.slots or 0, most)} in "
        f"{format_bytes(run.cache_bytes)}, empty at first; policy {CACHE_POLICY} of all layers of one shape together",
        f"memory of {home}: {format_bytes(run.used_bytes())} in all; all experts in {_host_memory(run)}",
    ]


def _share(count: int, most: int) -> str:
    return f"{count} of {most} experts ({100 * count / most:.0f} %)"


def _host_memory(run: GpuRun) -> str:
    hosts = run.loaded.hosts
    what = "pinned host memory" if hosts.is_pinned else "host memory that is not pinned, so uploads are slower"
    return f"{format_bytes(hosts.size_bytes)} of {what}"


def _why(run: GpuRun) -> str:
    if run.pool is not None and run.pool.pool.tier is not None and run.way != run.mode:
        return "the only one where host memory does not hold all experts"
    if not run.tried:
        return "asked for" if run.way == run.mode else "not measured: nothing was computed yet"
    measured = ", ".join(f"{way.mode} {1 / way.seconds:.1f}" for way in run.tried)
    first = run.tried[0].mode
    why = "the fastest" if run.mode == first else f"exact, and nearly as fast as {first},"
    return f"{why} on the first tokens of the prompt (tokens/s: {measured})"


def stock_gpu_lines(run: StockGpuRun) -> list[str]:
    """What stock llama.cpp does with the GPU."""
    cache = "" if run.slots is None else f"; its own cache has {run.slots} experts"
    return [f"stock llama.cpp on {run.device}{cache}"]


def gpu_load_json(run: GpuRun) -> dict[str, Any]:
    """For `load` of the report."""
    own = _cache_load_json(run, run.cache) if run.cache is not None else _pool_load_json(run.pool)
    return {
        "device": run.loaded.home.name,
        "layers": len(run.loaded.layers),
        "way": run.mode,
        "asked": run.way,
        "tried": [{"way": way.mode, "policy": way.policy, "seconds_per_token": way.seconds} for way in run.tried],
        "left_out": run.left_out,
        **own,
        "memory": {
            **own["memory"],
            "used_bytes": run.used_bytes(),
            "promised_bytes": run.promise.size_bytes,
            "host_bytes": run.loaded.hosts.size_bytes,
            "host_is_pinned": run.loaded.hosts.is_pinned,
        },
    }


def _pool_load_json(opened: PoolRun | None) -> dict[str, Any]:
    assert opened is not None, "one of the two is open"
    pool = opened.pool
    return {
        "slots_by_layer": {str(layer.layer): count for layer, count in zip(pool.layers, pool.counts, strict=True)},
        "slots": sum(pool.counts),
        "uploaded_bytes": pool.preloaded_bytes,
        "policy": pool.policy,
        "share": pool.share,
        "memory": {
            "slots_bytes": pool.bytes.slots,
            "stage_bytes": pool.bytes.stage,
            "pool_bytes": pool.bytes.total,
        },
        "host_tier": None if pool.tier is None else {"kind": pool.tier.kind, "slots": list(pool.tier.counts)},
    }


def _cache_load_json(run: GpuRun, cache: StockGpuRun) -> dict[str, Any]:
    return {
        "slots_by_layer": None,  # one list of slots for all layers of one shape
        "slots": cache.slots,
        "uploaded_bytes": 0,
        "policy": CACHE_POLICY,
        "share": None,
        "memory": {"slots_bytes": run.cache_bytes, "stage_bytes": 0, "pool_bytes": run.cache_bytes},
        "host_tier": None,
    }


def pool_json(counts: PoolCounts, tokens: int, tier: TierCounts | None = None) -> dict[str, Any]:
    """One phase, for `cache` of the report."""
    links = {"h2d": counts.to_home_bytes}
    if tier is not None:
        links = {"nvme": tier.nvme_bytes, "h2d": tier.h2d_bytes, "d2h": tier.d2h_bytes}
    return {
        "accesses": counts.accesses,
        "hits": counts.hits,
        "misses": counts.missed,
        "hit_rate": counts.hits / counts.accesses if counts.accesses else None,
        "on_cpu": counts.absent,
        "in_time": counts.in_time,
        "bytes_per_token": {name: size / tokens if tokens else None for name, size in links.items()},
        "from_ram": None if tier is None else tier.from_ram,
        "from_nvme": None if tier is None else tier.from_nvme,
        "stage_calls": counts.stage_calls,
        "wait_seconds": counts.wait_ns * 1e-9,
    }


def pool_rows(name: str, counts: PoolCounts, tokens: int, tier: TierCounts | None = None) -> list[tuple[str, str]]:
    """One phase, for `--stats`."""
    if not counts.accesses or not tokens:
        return []
    experts = (
        f"{name} experts",
        f"{counts.hits} of {counts.accesses} on the GPU ({100 * counts.hits / counts.accesses:.1f} %)",
    )
    if tier is not None:
        links = ((tier.nvme_bytes, "from disk"), (tier.h2d_bytes, "to the GPU"), (tier.d2h_bytes, "back from it"))
        each = ", ".join(f"{size / tokens / 1e6:.2f} MB {what}" for size, what in links)
        return [experts, (f"{name} misses", f"{tier.from_ram} from RAM, {tier.from_nvme} from disk; per token {each}")]
    moved = counts.to_home_bytes / tokens / 1e6
    early = f"{counts.in_time} brought ahead of their use" if counts.in_time else ""
    late = f"{counts.absent} computed on the CPU" if counts.absent else ""
    how = ", ".join(filter(None, (early, late))) or "each uploaded"
    return [experts, (f"{name} misses", f"{counts.missed}: {how}; {moved:.2f} MB per token to the GPU")]


def own_cache_json(counts: CacheCounts, speed: Speed) -> dict[str, Any]:
    """What llama.cpp's own cache did, for `cache` of the report, in the keys of `pool_json`; what it does not tell is None.

    It counts by the size of a batch: up to 8 tokens are `decode` here, 9 to 32 are `prompt`, larger ones it does not count.
    """
    prompt = _own_phase_json(counts.batch_hits, counts.batch_misses, counts.batch_uploaded_bytes, speed.prompt_tokens)
    decode = _own_phase_json(counts.hits, counts.misses, counts.uploaded_bytes, speed.decode_tokens)
    return {"phase": "decode", **decode, "prompt": prompt, "counted_by": "llama.cpp, by the size of a batch"}


def _own_phase_json(hits: int, misses: int, uploaded_bytes: int, tokens: int) -> dict[str, Any]:
    total = hits + misses
    return {
        "accesses": total,
        "hits": hits,
        "misses": misses,
        "hit_rate": hits / total if total else None,
        "on_cpu": 0,
        "bytes_per_token": {"h2d": uploaded_bytes / tokens if tokens else None},
        **dict.fromkeys(("in_time", "from_ram", "from_nvme", "stage_calls", "wait_seconds")),
    }


def own_cache_rows(counts: CacheCounts, speed: Speed) -> list[tuple[str, str]]:
    """What llama.cpp's own cache did, for `--stats`."""
    total = counts.hits + counts.misses
    if not total:
        return []
    moved = counts.uploaded_bytes / max(1, speed.decode_tokens) / 1e6
    return [
        ("decode experts", f"{counts.hits} of {total} on the GPU ({100 * counts.hits / total:.1f} %), counted by llama.cpp"),
        ("decode misses", f"{moved:.2f} MB per token to the GPU"),
    ]
