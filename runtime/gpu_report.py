"""What is said of a run with a GPU: how it was loaded, and what it did."""

from __future__ import annotations

from statistics import median_low
from typing import Any

from bel.formats.units import format_bytes
from bel.runtime.gpu_running import GpuRun
from bel.runtime.pool_counters import PoolCounts
from bel.runtime.stock_gpu import StockGpuRun
from bel.runtime.tier_counters import TierCounts


def gpu_lines(run: GpuRun) -> list[str]:
    """A line of the slots, one of the memory, and one of the way and why it was taken."""
    pool = run.pool.pool
    counts, most = list(pool.counts), [layer.n_expert for layer in pool.layers]
    share = f"{sum(counts)} of {sum(most)} experts ({100 * sum(counts) / sum(most):.0f} %)"
    spread = f"{min(counts)}/{median_low(counts)}/{max(counts)} of {max(most)}"
    memory = "pinned host memory" if pool.is_pinned else "host memory that is not pinned, so uploads are slower"
    held = "all experts"
    if pool.tier is not None:
        held = (
            f"{sum(pool.tier.counts)} experts that have no slot ({pool.tier.kind}; the others are read by {pool.tier.reader})"
        )
    lines = [
        f"{pool.home}: {len(counts)} layers, slots per layer (min/median/max) {spread}: {share} in "
        f"{format_bytes(pool.bytes.slots)}; preloaded {format_bytes(pool.preloaded_bytes)}; policy {pool.policy}",
        f"memory of {pool.home}: {format_bytes(run.used_bytes())} in all, {format_bytes(pool.bytes.slots)} for slots and "
        f"{format_bytes(pool.bytes.stage)} for a layer's stage; {held} in {format_bytes(pool.host_bytes)} of {memory}",
        f"way {pool.mode}: {_why(run)}",
    ]
    if pool.mode != "upload":
        lines.append(f"way {pool.mode} computes on the CPU too, whose last bits differ from the GPU's; upload gives the GPU's")
    return lines


def _why(run: GpuRun) -> str:
    if run.pool.pool.tier is not None and run.way != run.pool.pool.mode:
        return "the only one where host memory does not hold all experts"
    if not run.tried:
        return "asked for" if run.way == run.pool.pool.mode else "not measured: nothing was computed yet"
    measured = ", ".join(f"{way.mode} {1 / way.seconds:.1f}" for way in run.tried)
    return f"the fastest on the first tokens of the prompt (tokens/s: {measured})"


def stock_gpu_lines(run: StockGpuRun) -> list[str]:
    """What stock llama.cpp does with the GPU."""
    cache = "" if run.slots is None else f"; its own cache has {run.slots} experts"
    return [f"stock llama.cpp on {run.device}{cache}"]


def gpu_load_json(run: GpuRun) -> dict[str, Any]:
    """For `load` of the report."""
    pool = run.pool.pool
    return {
        "device": pool.home,
        "layers": len(pool.counts),
        "slots_by_layer": {str(layer.layer): count for layer, count in zip(pool.layers, pool.counts, strict=True)},
        "uploaded_bytes": pool.preloaded_bytes,
        "policy": pool.policy,
        "way": pool.mode,
        "asked": run.way,
        "tried": [{"way": way.mode, "policy": way.policy, "seconds_per_token": way.seconds} for way in run.tried],
        "share": pool.share,
        "memory": {
            "slots_bytes": pool.bytes.slots,
            "stage_bytes": pool.bytes.stage,
            "pool_bytes": pool.bytes.total,
            "used_bytes": run.used_bytes(),
            "promised_bytes": run.vram_bytes,
            "host_bytes": pool.host_bytes,
            "host_is_pinned": pool.is_pinned,
        },
        "host_tier": None if pool.tier is None else {"kind": pool.tier.kind, "slots": list(pool.tier.counts)},
    }


def pool_json(counts: PoolCounts, tokens: int, tier: TierCounts | None = None) -> dict[str, Any]:
    """One phase, for `cache` of the report."""
    links = {"h2d": counts.uploaded_bytes + counts.staged_bytes}
    if tier is not None:
        links = {"nvme": tier.nvme_bytes, "h2d": tier.h2d_bytes, "d2h": tier.d2h_bytes}
    return {
        "accesses": counts.accesses,
        "hits": counts.hits,
        "misses": counts.missed,
        "hit_rate": counts.hits / counts.accesses if counts.accesses else None,
        "on_cpu": counts.absent,
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
    moved = (counts.uploaded_bytes + counts.staged_bytes) / tokens / 1e6
    return [experts, (f"{name} misses", f"{counts.absent} computed on the CPU; {moved:.2f} MB per token to the GPU")]
