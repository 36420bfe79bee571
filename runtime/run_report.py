"""What a run did: the object that `--json` prints, and the rows of `--stats`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bel.formats.units import format_bytes
from bel.runtime.bundle_model import BundleRun
from bel.runtime.counters import PhaseCounters
from bel.runtime.generate import Speed
from bel.runtime.load_line import slots_by_layer
from bel.runtime.running import Running
from bel.runtime.slot_budget import MARGIN_BYTES

if TYPE_CHECKING:
    from bel.runtime.pool_model import Pool

NS = 1e-9
STOCK_READER = "mmap"


@dataclass(frozen=True, slots=True)
class RunReport:
    """A generation that has ended.  `major_faults` are those of its decodes, `ended` is of `generate.py`."""

    text: str
    tokens: Sequence[int]
    ended: str
    speed: Speed
    major_faults: int
    peak_rss_bytes: int


def report_json(report: RunReport, running: Running) -> dict[str, Any]:
    """The object of `--json`.  A quantity whose denominator is 0 is None; `cache` is None where nothing counts: for a stock run
    without a cache, and with llama.cpp's own before the run is finished.
    """
    speed, run = report.speed, running.bundle
    return {
        "text": report.text,
        "tokens": list(report.tokens),
        "ended": report.ended,
        "load": _load_json(running),
        "speed": {
            "prompt_tokens": speed.prompt_tokens,
            "prompt_seconds": speed.prompt_seconds,
            "prompt_tokens_per_s": _ratio(speed.prompt_tokens, speed.prompt_seconds),
            "decode_tokens": speed.decode_tokens,
            "decode_seconds": speed.decode_seconds,
            "decode_tokens_per_s": _ratio(speed.decode_tokens, speed.decode_seconds),
        },
        "cache": _gpu_cache_json(running, speed) if run is None else _cache_json(run, speed),
        "major_faults_per_token": _ratio(report.major_faults, speed.decode_tokens),
        "peak_rss_bytes": report.peak_rss_bytes,
    }


def _load_json(running: Running) -> dict[str, Any]:
    run, context = running.bundle, running.context
    sizes = {"n_ctx": context.n_ctx, "n_ubatch": context.n_ubatch, "n_threads": context.options.n_threads}
    if running.gpu is not None:
        from bel.runtime.gpu_report import gpu_load_json

        return {"reader": "all before the first token", **gpu_load_json(running.gpu), **sizes}
    if run is None:
        empty = dict.fromkeys(("slots_by_layer", "uploaded_bytes", "policy", "memory"))
        return {"layers": running.model.n_layer, "reader": STOCK_READER, **empty, **sizes}
    slots = slots_by_layer(run)
    memory = {f"{name}_bytes": size for name, size in asdict(run.memory).items()}
    memory |= {"margin_bytes": MARGIN_BYTES, "total_bytes": run.memory.total, "promised_bytes": running.promised_bytes}
    return {
        "layers": len(slots),
        "slots_by_layer": {str(layer): count for layer, count in slots.items()},
        "uploaded_bytes": run.uploaded_bytes,
        "reader": run.pager.name,
        "reader_why": run.pager.why or None,
        "policy": running.policy,
        "memory": memory,
        **sizes,
    }


def _gpu_cache_json(running: Running, speed: Speed) -> dict[str, Any] | None:
    if running.own_counts is not None:
        from bel.runtime.gpu_report import own_cache_json

        return own_cache_json(running.own_counts, speed)
    return _pool_json(running.gpu.pool.pool, speed) if running.gpu is not None and running.gpu.pool is not None else None


def _pool_json(pool: Pool, speed: Speed) -> dict[str, Any]:
    from bel.runtime.gpu_report import pool_json

    counters, tier = pool.counters, pool.tier
    lower = (None, None) if tier is None else (tier.counters.decode, tier.counters.prompt)
    decode = pool_json(counters.decode, speed.decode_tokens, lower[0])
    return {"phase": "decode", **decode, "prompt": pool_json(counters.prompt, speed.prompt_tokens, lower[1])}


def _cache_json(run: BundleRun, speed: Speed) -> dict[str, Any]:
    """The decode phase, and under `prompt` the other one."""
    counters = run.cache.counters
    return {
        "phase": "decode",
        **_phase_json(counters.decode, speed.decode_tokens),
        "prompt": _phase_json(counters.prompt, speed.prompt_tokens),
    }


def _phase_json(phase: PhaseCounters, tokens: int) -> dict[str, Any]:
    return {
        "accesses": phase.accesses,
        "hits": phase.hits,
        "misses": phase.missed,
        "hit_rate": _ratio(phase.hits, phase.accesses),
        "bytes_per_token": {"nvme": _ratio(phase.read_bytes, tokens)},
        "read_bytes": phase.read_bytes,
        "stall_seconds": phase.wait_ns * NS,
        "check_seconds": phase.check_ns * NS,
        "callback_seconds": phase.callback_ns * NS,
        "prefetch_hits": phase.prefetched_hits,
        "prefetch_wasted": phase.wasted,
        "uploads": phase.uploads,
    }


def report_rows(report: RunReport, running: Running) -> list[tuple[str, str]]:
    """What `--stats` shows."""
    speed, run = report.speed, running.bundle
    rows = [
        ("prompt", _speed_text(speed.prompt_tokens, speed.prompt_seconds)),
        ("decode", _speed_text(speed.decode_tokens, speed.decode_seconds)),
    ]
    if run is not None:
        counters = run.cache.counters
        rows += _phase_rows("prompt", counters.prompt, speed.prompt_tokens, speed.prompt_seconds)
        rows += _phase_rows("decode", counters.decode, speed.decode_tokens, speed.decode_seconds)
    if running.own_counts is not None:
        from bel.runtime.gpu_report import own_cache_rows

        rows += own_cache_rows(running.own_counts, speed)
    if running.gpu is not None and running.gpu.pool is not None:
        from bel.runtime.gpu_report import pool_rows

        pool, tier = running.gpu.pool.pool.counters, running.gpu.pool.pool.tier
        lower = (None, None) if tier is None else (tier.counters.prompt, tier.counters.decode)
        rows += pool_rows("prompt", pool.prompt, speed.prompt_tokens, lower[0])
        rows += pool_rows("decode", pool.decode, speed.decode_tokens, lower[1])
    if speed.decode_tokens:
        rows.append(("major faults", f"{report.major_faults / speed.decode_tokens:.2f} per token"))
    return [*rows, ("peak memory", format_bytes(report.peak_rss_bytes))]


def _speed_text(tokens: int, seconds: float) -> str:
    if not tokens:
        return "nothing computed"
    return f"{tokens} tokens in {seconds:.2f} s: {tokens / max(seconds, NS):.2f} tokens/s"


def _phase_rows(name: str, phase: PhaseCounters, tokens: int, seconds: float) -> list[tuple[str, str]]:
    if not phase.accesses or not tokens or not seconds:
        return []
    total = seconds / NS
    own = phase.callback_ns - phase.wait_ns - phase.check_ns
    shares = {"compute": total - phase.callback_ns, "callback": own, "reads": phase.wait_ns, "checksums": phase.check_ns}
    return [
        (f"{name} experts", f"{phase.hits} of {phase.accesses} there already ({100 * phase.hits / phase.accesses:.1f} %)"),
        (
            f"{name} reads",
            f"{phase.read_bytes / tokens / 1e6:.2f} MB and {phase.wait_ns / tokens / 1e6:.2f} ms of waiting per token",
        ),
        (f"{name} ahead", f"{phase.prefetched_hits} read ahead and used, {phase.wasted} in vain"),
        (f"{name} time", ", ".join(f"{what} {100 * ns / total:.1f} %" for what, ns in shares.items())),
    ]


def _ratio(amount: float, count: float) -> float | None:
    return amount / count if count else None
