"""What a measurement found: the object of `--bench --json`, and the rows that people see."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bel.formats.units import format_bytes
from bel.runtime.bench import BenchResult, Pass
from bel.runtime.counters import PhaseCounters
from bel.runtime.generate import LENGTH, Speed
from bel.runtime.run_report import RunReport

NS, MS = 1e-9, 1e3
MAX_OTHER_CORES = 0.2
"""Above it a measurement says more about the machine's other work: one thread of two waits for the slower one."""


def run_report(one: Pass, tokens: Sequence[int], peak_rss_bytes: int) -> RunReport:
    """A pass as the run that it is, in the terms that every run is reported in."""
    seconds = float(one.token_seconds.sum())
    speed = Speed(one.prompt_tokens, one.prompt_seconds, len(one.token_seconds), seconds)
    return RunReport("", list(tokens), LENGTH, speed, int(one.token_faults.sum()), peak_rss_bytes)


def pass_json(one: Pass) -> dict[str, Any]:
    """The figures of one pass, times in milliseconds per decoded token; what a stock run does not have is None.

    The last half is the later half of the decoded tokens, when the slots have filled.
    """
    seconds, n_tokens = one.token_seconds, len(one.token_seconds)
    late = n_tokens // 2
    total = float(seconds.sum())
    return {
        "name": one.name,
        "prompt_tokens_per_s": one.prompt_tokens / one.prompt_seconds,
        "prompt_major_faults": one.prompt_faults,
        "decode_tokens_per_s": n_tokens / total,
        "median_tokens_per_s": 1 / statistics.median(seconds.tolist()),
        "last_half_tokens_per_s": (n_tokens - late) / float(seconds[late:].sum()),
        "ms_per_token": total / n_tokens * MS,
        "major_faults_per_token": int(one.token_faults.sum()) / n_tokens,
        "last_half_major_faults_per_token": int(one.token_faults[late:].sum()) / (n_tokens - late),
        **_slots_json(one.decode, one.alone_seconds, total, n_tokens),
    }


def _slots_json(phase: PhaseCounters | None, alone_seconds: float | None, total: float, n_tokens: int) -> dict[str, Any]:
    """What the slots did while decoding.  `shares` are parts of a token's time and sum to 1.

    `read_alone_ms_per_token`: what the same reads take with nothing else done; `hidden_ratio` is the part of that for which
    decoding did not stand still.  It is below 0 where reads between computing took longer than reads alone.
    """
    keys = ("hit_rate", "read_mb_per_token", "wait_ms_per_token", "check_ms_per_token", "callback_ms_per_token")
    empty = dict.fromkeys((*keys, "compute_ms_per_token", "shares", "read_alone_ms_per_token", "hidden_ratio"))
    if phase is None:
        return empty
    wait, check = phase.wait_ns * NS, phase.check_ns * NS
    own, compute = phase.callback_ns * NS - wait - check, total - phase.callback_ns * NS
    each = MS / n_tokens
    return {
        "hit_rate": phase.hits / phase.accesses if phase.accesses else None,
        "read_mb_per_token": phase.read_bytes / n_tokens / 1e6,
        "wait_ms_per_token": wait * each,
        "check_ms_per_token": check * each,
        "callback_ms_per_token": own * each,
        "compute_ms_per_token": compute * each,
        "shares": {"compute": compute / total, "callback": own / total, "reads": wait / total, "checksums": check / total},
        "read_alone_ms_per_token": None if alone_seconds is None else alone_seconds * each,
        "hidden_ratio": None if alone_seconds is None else 1 - wait / alone_seconds,
    }


def whole_json(result: BenchResult) -> dict[str, Any]:
    """What is said once: the machine and its memory."""
    group = result.group
    return {
        "load_seconds": result.load_seconds,
        "n_threads": result.n_threads,
        "load_average": result.load_average,
        "other_cores": result.other_cores,
        "peak_rss_bytes": result.peak_rss_bytes,
        "cgroup": None if group is None else {"limit_bytes": group.limit_bytes, "peak_bytes": group.peak_bytes},
    }


def load_warning(result: BenchResult) -> str | None:
    """What to say of a machine that was busy with other things."""
    if result.other_cores <= MAX_OTHER_CORES:
        return None
    return (
        f"the machine was loaded: others kept {result.other_cores:.1f} cores busy (load average {result.load_average:.1f}); "
        "measure again on an idle one"
    )


def pass_rows(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A line for each figure, a column for each pass, the first line being their names; what none has is left out."""
    lines: list[tuple[str, tuple[str | None, ...]]] = [
        ("", tuple(row["name"] for row in rows)),
        *((label, tuple(_shown(row[key], form) for row in rows)) for key, label, form in _FIGURES),
        ("compute / callback / reads / checksums", tuple(_shares(row["shares"]) for row in rows)),
    ]
    return [(label, *(cell or "-" for cell in cells)) for label, cells in lines if any(cell is not None for cell in cells)]


_FIGURES = (
    ("prompt_tokens_per_s", "prompt, tokens/s", "{:.2f}"),
    ("decode_tokens_per_s", "decode, tokens/s, filling of slots included", "{:.2f}"),
    ("median_tokens_per_s", "  median token", "{:.2f}"),
    ("last_half_tokens_per_s", "  last half", "{:.2f}"),
    ("hit_rate", "experts that were there", "{:.1%}"),
    ("read_mb_per_token", "read, MB per token", "{:.1f}"),
    ("ms_per_token", "a token, ms", "{:.1f}"),
    ("wait_ms_per_token", "  waiting for reads, ms", "{:.1f}"),
    ("check_ms_per_token", "  checksums, ms", "{:.1f}"),
    ("callback_ms_per_token", "  callback, ms", "{:.1f}"),
    ("compute_ms_per_token", "  compute, ms", "{:.1f}"),
    ("read_alone_ms_per_token", "the same reads alone, ms per token", "{:.1f}"),
    ("hidden_ratio", "  hidden behind computing", "{:.0%}"),
    ("major_faults_per_token", "major faults per token", "{:.2f}"),
    ("last_half_major_faults_per_token", "  last half", "{:.2f}"),
)


def _shown(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)


def _shares(shares: dict[str, float] | None) -> str | None:
    return None if shares is None else " / ".join(f"{100 * share:.0f} %" for share in shares.values())


def whole_line(result: BenchResult) -> str:
    """Memory, threads and load, in one line."""
    group = result.group
    parts = [f"loaded in {result.load_seconds:.2f} s", f"peak memory {format_bytes(result.peak_rss_bytes)}"]
    if group is not None and group.peak_bytes is not None:
        parts.append(f"charged to the control group at most {format_bytes(group.peak_bytes)}")
    return ", ".join([*parts, f"{result.n_threads} threads", f"load average {result.load_average:.2f} before"])
