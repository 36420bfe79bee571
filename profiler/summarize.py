"""From traces to a profile: counts, exact LRU curves, layer times and token-to-token repeats of each workload."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bel.formats.profile import EQUAL, LayerStats, LayerTime, PhaseStats, Profile, Run, Workload, weighted
from bel.formats.trace import DECODE, PROMPT
from bel.formats.trace_calls import LayerCalls, Trace, read_trace
from bel.formats.trace_header import TraceHeader
from bel.profiler.belady import belady_hits
from bel.profiler.curves import LruCurve, lru_curves
from bel.profiler.miss_tables import BELADY_MEASURE, MEASURE, MissParts, decode_misses, misses_to_json, pool
from bel.profiler.same_model import Identity, check_all_same, merged_layers

_REPEAT_CHUNK_ROWS = 1 << 16  # 64 Ki rows of 8 ids compare in 4 MiB


@dataclass(frozen=True, slots=True)
class Summary:
    """A profile, and what is to be said about the traces that it was made of."""

    profile: Profile
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _LayerSums:
    """What one trace adds to one layer, by phase."""

    tokens: tuple[int, int]
    calls: tuple[int, int]
    counts: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
    curves: tuple[LruCurve, LruCurve]
    times: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
    repeated: int
    repeatable: int
    misses: MissParts
    belady: npt.NDArray[np.int64]


def summarize(paths: list[Path]) -> Summary:
    """The profile of one or more traces of one model.

    Traces of one workload are pooled: their counts and hits are added, each from an empty cache.  Different workloads stay
    apart, with equal weights.  Raises BadInputError for a trace that is damaged, or of another model.
    """
    identities: list[Identity] = []
    by_workload: dict[str, list[list[_LayerSums]]] = {}
    runs: dict[str, list[Run]] = {}
    notes: list[str] = []
    for path in paths:
        trace = read_trace(path)
        notes += [f"{path}: {note}" for note in trace.notes]
        identities.append(_identity(path, trace.header))
        check_all_same(identities)
        name = trace.header.workload
        if name in by_workload:
            notes.append(f"{path}: pooled with the other traces of workload {name}: counts are added")
        by_workload.setdefault(name, []).append(_sums(trace))
        runs.setdefault(name, []).append(_run(trace.header))
    workloads = tuple(
        Workload(name, 0.0, tuple(_stats(list(parts)) for parts in zip(*sums, strict=True)), tuple(runs[name]))
        for name, sums in by_workload.items()
    )
    notes += [f"workload {w.name} has no tokens" for w in workloads if not w.tokens]
    first = identities[0]
    profile = Profile(
        model_name=first.model_name,
        arch=next((i.arch for i in identities if i.arch), ""),
        fingerprint=first.fingerprint,
        layers=merged_layers(identities),
        weighting=EQUAL,
        workloads=weighted(workloads, EQUAL),
    )
    return Summary(profile, tuple(notes))


def _identity(path: Path, header: TraceHeader) -> Identity:
    return Identity(str(path), header.model_name, header.arch, header.fingerprint, header.layers)


def _run(header: TraceHeader) -> Run:
    sampling: dict[str, Any] = dict(header.sampling or {})
    return Run(header.engine, header.engine_build, sampling, header.prompts)


def _sums(trace: Trace) -> list[_LayerSums]:
    """The inner loop runs without the interpreter's lock, so that layers share the cores."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(_layer_sums, trace.layers))


def _layer_sums(calls: LayerCalls) -> _LayerSums:
    n = calls.info.n_expert
    phase_of_row = np.repeat(calls.phase, calls.rows_per_call)
    counts = [np.bincount(calls.ids[phase_of_row == p].ravel(), minlength=n).astype(np.int64) for p in (PROMPT, DECODE)]
    times = [_taken(calls, p) for p in (PROMPT, DECODE)]
    prompts = int(np.count_nonzero(calls.phase == PROMPT))
    repeated, repeatable = _repeats(calls, phase_of_row)
    return _LayerSums(
        tokens=(int(np.count_nonzero(phase_of_row == PROMPT)), int(np.count_nonzero(phase_of_row == DECODE))),
        calls=(prompts, len(calls.phase) - prompts),
        counts=(counts[0], counts[1]),
        curves=lru_curves(calls),
        times=(times[0], times[1]),
        repeated=repeated,
        repeatable=repeatable,
        misses=decode_misses(calls),
        belady=belady_hits(calls, (DECODE,)),
    )


def _taken(calls: LayerCalls, phase: int) -> npt.NDArray[np.int64]:
    if calls.time_ns is None:
        return np.zeros(0, np.int64)
    taken: npt.NDArray[np.int64] = calls.time_ns[(calls.phase == phase) & (calls.time_ns >= 0)]
    return taken


def _repeats(calls: LayerCalls, phase_of_row: npt.NDArray[np.uint8]) -> tuple[int, int]:
    """For decode rows that follow the row of the token before: the ids that that row has too, and all ids."""
    follows = np.flatnonzero((phase_of_row[1:] == DECODE) & (np.diff(calls.token) == 1)) + 1
    repeated = 0
    for at in range(0, len(follows), _REPEAT_CHUNK_ROWS):
        rows = follows[at : at + _REPEAT_CHUNK_ROWS]
        same = calls.ids[rows][:, :, None] == calls.ids[rows - 1][:, None, :]
        repeated += int(np.count_nonzero(same.any(axis=2)))
    return repeated, len(follows) * calls.info.top_k


def _stats(parts: list[_LayerSums]) -> LayerStats:
    of = sum(p.repeatable for p in parts)
    locality = {
        "decode": {"repeated": sum(p.repeated for p in parts), "of": of},
        MEASURE: misses_to_json(pool([p.misses for p in parts])),
        BELADY_MEASURE: np.sum([p.belady for p in parts], axis=0).tolist(),
    }
    return LayerStats(_phase(parts, PROMPT), _phase(parts, DECODE), locality)


def _phase(parts: list[_LayerSums], phase: int) -> PhaseStats:
    hits = sum(p.curves[phase].hits for p in parts)
    counts = sum(p.counts[phase] for p in parts)
    return PhaseStats(
        tokens=sum(p.tokens[phase] for p in parts),
        counts=tuple(np.asarray(counts).tolist()),
        calls=sum(p.calls[phase] for p in parts),
        accesses=sum(p.curves[phase].accesses for p in parts),
        cold_misses=sum(p.curves[phase].cold_misses for p in parts),
        lru_hits=tuple(np.asarray(hits).tolist()),
        time=_time(np.concatenate([p.times[phase] for p in parts])),
    )


def _time(times: npt.NDArray[np.int64]) -> LayerTime | None:
    if not len(times):
        return None
    median, p90 = np.percentile(times, [50, 90])
    return LayerTime(len(times), round(float(times.mean())), round(float(median)), round(float(p90)))
