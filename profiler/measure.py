"""From profiles and traces to the numbers of each workload and layer that a report is made of."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bel.formats.errors import BadInputError, printable
from bel.formats.gguf_header import MAGIC as GGUF_MAGIC
from bel.formats.profile import LayerStats, Profile, Workload
from bel.formats.trace import DECODE, PHASES, PROMPT
from bel.formats.trace_calls import LayerCalls, Trace, read_trace
from bel.formats.trace_header import TraceHeader, TraceLayer
from bel.formats.trace_layout import MAGIC
from bel.profiler.belady import belady_hits
from bel.profiler.curves import lru_curves
from bel.profiler.inputs import read_profile
from bel.profiler.locality import SEGMENTS, Counts, Reuse, Rows, reuse, segment_cache_hits, segment_routing
from bel.profiler.same_model import Identity, check_same_model, merged_layers
from bel.profiler.static_sets import fold_counts, split_calls

PREFIX_TOKENS = tuple(digit * 10**power for power in range(2, 9) for digit in (1, 2, 5))
"""Lengths of a short profile: 100, 200, 500, 1000 and so on."""


@dataclass(frozen=True, slots=True)
class View:
    """Which calls count: those of `phase`, a key of PHASES.

    With `one_by_one` each row of a prompt is a call of its own, as if the same text had been decoded.
    """

    phase: str = "decode"
    one_by_one: bool = False


@dataclass(frozen=True, slots=True)
class SegmentSums:
    """SRP and SCH for segments of `tokens`: the sum over `segments`, and `hits` of `accesses` with half of the experts."""

    tokens: int
    routing_sum: float
    segments: int
    hits: int
    accesses: int


@dataclass(frozen=True, slots=True)
class TracedLayer:
    """What only traces tell about one layer.  n = n_expert.

    `belady_hits` (n + 1,) i64.  `fold_uses` (2, n) i64: the accesses to each expert in the two parts of the work.
    `fold_tokens`: the counted rows of each part.  `prefixes`: for a length in tokens the selections (2, n) in the first
    rows of each part, where both parts are longer than that.
    """

    split: str
    belady_hits: Counts
    fold_uses: Counts
    fold_tokens: tuple[int, int]
    prefixes: dict[int, Counts]
    reuse: Reuse
    segments: tuple[SegmentSums, ...]


@dataclass(frozen=True, slots=True)
class LayerData:
    """One layer of one workload under a view.  n = n_expert; None where the input does not tell.

    `tokens` rows, `selections` (n,) i64 of them.  `uses` (n,) i64: the calls that use each expert, which are `accesses` in
    all.  `lru_hits` (n + 1,) i64.  `repeats`: how many ids the token before chose too, and of how many that is known.
    """

    info: TraceLayer
    tokens: int
    selections: Counts
    uses: Counts | None
    accesses: int | None
    lru_hits: Counts | None
    repeats: tuple[int, int]
    traced: TracedLayer | None


@dataclass(frozen=True, slots=True)
class WorkloadData:
    """One workload: its files, its rows in both phases, and its layers in the order of the model."""

    name: str
    files: tuple[str, ...]
    prompt_tokens: int
    decode_tokens: int
    layers: tuple[LayerData, ...]

    @property
    def is_traced(self) -> bool:
        """Whether it comes from traces and not from a profile."""
        return self.layers[0].traced is not None


@dataclass(frozen=True, slots=True)
class Measured:
    """All inputs of a report.  Names are printable, whatever the files hold.  `notes` belong on stderr."""

    model_name: str
    arch: str
    view: View
    workloads: tuple[WorkloadData, ...]
    notes: tuple[str, ...]


def measure(paths: Sequence[Path], view: View, *, threads: int = 2) -> Measured:
    """Read profiles and traces of one model.

    Traces of one workload are pooled, each from an empty cache.  A workload that is in a trace and in a profile is taken
    from the trace.  Raises BadInputError for a file that is neither, is damaged, or is of another model.
    """
    identities: list[Identity] = []
    traces: dict[str, list[tuple[Path, Trace]]] = {}
    profiles: list[tuple[Path, Profile]] = []
    notes: list[str] = []
    for path in paths:
        if _is_trace(path):
            trace = read_trace(path)
            notes += [f"{path}: {note}" for note in trace.notes]
            traces.setdefault(trace.header.workload, []).append((path, trace))
            identities.append(_identity(path, trace.header))
        else:
            profiles.append((path, read_profile(path)))
            identities.append(_identity(path, profiles[-1][1]))
        check_same_model(identities[0], identities[-1])
    layers = merged_layers(identities)
    works = [_of_traces(name, runs, layers, view, threads) for name, runs in traces.items()]
    for path, profile in profiles:
        for work in profile.workloads:
            if work.name in traces:
                notes.append(f"{path}: workload {work.name} is shown from its traces")
            else:
                works.append(_of_profile(work, path, layers, view, {w.name for w in works}))
    first = identities[0]
    arch = next((i.arch for i in identities if i.arch), "")
    return Measured(printable(first.model_name), printable(arch), view, tuple(works), tuple(notes))


def _is_trace(path: Path) -> bool:
    if not path.is_file():
        if path.exists():
            raise BadInputError("this is no profile and no trace: it is not a file", path=str(path))
        raise BadInputError("no such file", path=str(path))
    with path.open("rb") as file:
        head = file.read(len(MAGIC))
    if head[:4] == GGUF_MAGIC:
        raise BadInputError("this is a model, not a profile or a trace", path=str(path), hint="bel-profile record makes both")
    return head == MAGIC


def _identity(path: Path, source: TraceHeader | Profile) -> Identity:
    return Identity(str(path), source.model_name, source.arch, source.fingerprint, source.layers)


def _of_profile(work: Workload, path: Path, layers: Sequence[TraceLayer], view: View, taken: set[str]) -> WorkloadData:
    number, name = 2, work.name
    while name in taken:
        name, number = f"{work.name}-{number}", number + 1
    return WorkloadData(
        name=name,
        files=(str(path),),
        prompt_tokens=max(x.prompt.tokens for x in work.layers),
        decode_tokens=max(x.decode.tokens for x in work.layers),
        layers=tuple(_of_stats(stats, info, view) for stats, info in zip(work.layers, layers, strict=True)),
    )


def _of_stats(stats: LayerStats, info: TraceLayer, view: View) -> LayerData:
    parts = [(stats.prompt, stats.decode)[phase] for phase in PHASES[view.phase]]
    parts = [p for p in parts if p.tokens]
    selections = _sum([p.counts for p in parts], info.n_expert)
    uses = hits = accesses = None
    is_split_up = view.one_by_one and any(p.calls != p.tokens for p in parts)
    if all(p.lru_hits is not None for p in parts) and not is_split_up:
        accesses = sum(p.accesses or 0 for p in parts)
        hits = _sum([p.lru_hits or () for p in parts], info.n_expert + 1)
    if is_split_up or accesses == int(selections.sum()):  # else: how calls share experts is not known of counts
        uses, accesses = selections, int(selections.sum())
    return LayerData(
        info=info,
        tokens=sum(p.tokens for p in parts),
        selections=selections,
        uses=uses,
        accesses=accesses,
        lru_hits=hits,
        repeats=_repeats(stats.locality.get(view.phase)),
        traced=None,
    )


def _repeats(kept: object) -> tuple[int, int]:
    """What `summarize` keeps of a phase; it stands in the free part of a profile, so that anything may be there."""
    values = [kept.get(key) for key in ("repeated", "of")] if isinstance(kept, dict) else []
    known = [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
    return (known[0], known[1]) if len(known) == 2 and 0 <= known[0] <= known[1] else (0, 0)


def _sum(rows: Sequence[tuple[int, ...]], length: int) -> Counts:
    total: Counts = np.array(rows, np.int64).reshape(-1, length).sum(axis=0)
    return total


def _of_traces(
    name: str, runs: Sequence[tuple[Path, Trace]], layers: Sequence[TraceLayer], view: View, threads: int
) -> WorkloadData:
    def one(place: int) -> LayerData:
        return _of_calls([trace.layers[place] for _, trace in runs], layers[place], view)

    with ThreadPoolExecutor(threads) as pool:  # the inner loops run without the interpreter's lock
        data = tuple(pool.map(one, range(len(layers))))
    rows = [_rows_by_phase([trace.layers[place] for _, trace in runs]) for place in range(len(layers))]
    return WorkloadData(
        name=printable(name) or "(no name)",
        files=tuple(str(path) for path, _ in runs),
        prompt_tokens=max(r[PROMPT] for r in rows),
        decode_tokens=max(r[DECODE] for r in rows),
        layers=data,
    )


def _rows_by_phase(runs: Sequence[LayerCalls]) -> tuple[int, int]:
    rows = [np.bincount(c.phase, weights=c.rows_per_call, minlength=2) for c in runs]
    return int(sum(r[PROMPT] for r in rows)), int(sum(r[DECODE] for r in rows))


def one_by_one(calls: LayerCalls) -> LayerCalls:
    """The same rows, each as a call of its own; without layer times."""
    rows = calls.rows_per_call
    return replace(
        calls,
        order=np.repeat(calls.order, rows),
        phase=np.repeat(calls.phase, rows),
        ubatch=np.repeat(calls.ubatch, rows),
        row_start=np.arange(len(calls.token) + 1),
        time_ns=None,
    )


def _of_calls(runs: Sequence[LayerCalls], info: TraceLayer, view: View) -> LayerData:
    """One layer of the runs of a workload."""
    if view.one_by_one:
        runs = [one_by_one(c) for c in runs]
    phases = PHASES[view.phase]
    n = info.n_expert
    split = split_calls(runs, phases)
    uses = np.sum([fold_counts(c, folds) for c, folds in zip(runs, split.folds, strict=True)], axis=0)
    curves = [lru_curves(c)[phase] for c in runs for phase in phases]
    folds_of_rows = [np.repeat(folds, c.rows_per_call) for c, folds in zip(runs, split.folds, strict=True)]
    parts = [np.concatenate([c.ids[f == part] for c, f in zip(runs, folds_of_rows, strict=True)]) for part in (0, 1)]
    found = [reuse(c.ids, c.token, f >= 0, n) for c, f in zip(runs, folds_of_rows, strict=True)]
    rows = [c.ids[f >= 0] for c, f in zip(runs, folds_of_rows, strict=True)]
    traced = TracedLayer(
        split=split.kind,
        belady_hits=np.sum([belady_hits(c, phases) for c in runs], axis=0),
        fold_uses=uses,
        fold_tokens=(len(parts[0]), len(parts[1])),
        prefixes=_prefixes(parts, n),
        reuse=Reuse(np.sum([r.gaps for r in found], axis=0), sum(r.repeated for r in found), sum(r.repeatable for r in found)),
        segments=tuple(_segments(rows, info, tokens) for tokens in SEGMENTS),
    )
    return LayerData(
        info=info,
        tokens=sum(traced.fold_tokens),
        selections=sum((_count(p, n) for p in parts), np.zeros(n, np.int64)),
        uses=uses.sum(axis=0),
        accesses=int(uses.sum()),
        lru_hits=np.sum([c.hits for c in curves], axis=0),
        repeats=(traced.reuse.repeated, traced.reuse.repeatable),
        traced=traced,
    )


def _prefixes(parts: Sequence[Rows], n_expert: int) -> dict[int, Counts]:
    shorter = min(len(p) for p in parts)
    return {n: np.stack([_count(p[:n], n_expert) for p in parts]) for n in PREFIX_TOKENS if n < shorter}


def _count(rows: Rows, n_expert: int) -> npt.NDArray[np.int64]:
    return np.bincount(rows.ravel(), minlength=n_expert).astype(np.int64)


def _segments(runs: Sequence[Rows], info: TraceLayer, tokens: int) -> SegmentSums:
    routing = [segment_routing(rows, info.n_expert, tokens) for rows in runs]
    slots = max(info.n_expert // 2, info.top_k)
    hits = [segment_cache_hits(rows, info.n_expert, tokens, slots) for rows in runs]
    return SegmentSums(
        tokens, sum(s for s, _ in routing), sum(n for _, n in routing), sum(h for h, _ in hits), sum(a for _, a in hits)
    )
