"""From the measured workloads to the answers of a report.  Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from bel.formats.trace_header import TraceLayer
from bel.profiler.answers import (
    FRACTIONS,
    GAP_QUANTILES,
    HALF,
    POLICIES,
    EnoughAnswer,
    LayerAnswer,
    PairAnswer,
    Rates,
    Report,
    SegmentAnswer,
    TransferAnswer,
    WorkloadAnswer,
)
from bel.profiler.locality import (
    MAX_GAP,
    SEGMENTS,
    entropy,
    gap_quantile,
    top_overlap,
    top_share,
    top_tenth,
)
from bel.profiler.measure import LayerData, Measured, WorkloadData
from bel.profiler.static_sets import BY_TOKEN, Transfer, held_out_hits, random_hits, static_hits, transfer

Hits = npt.NDArray[np.int64] | npt.NDArray[np.float64] | None


def make_report(measured: Measured) -> Report:
    """The answers that the inputs give."""
    works = measured.workloads
    return Report(
        model_name=measured.model_name,
        arch=measured.arch,
        phase=measured.view.phase,
        one_by_one=measured.view.one_by_one,
        workloads=tuple(_workload(w) for w in works),
        pairs=tuple(_pair(a, b) for a, b in itertools.combinations(works, 2)),
        transfer=_transfer(works) if len(works) > 1 else None,
        missing=tuple(_missing(measured)),
    )


def report_json(report: Report) -> dict[str, Any]:
    """The report as plain values, without the usage of single experts, which a profile holds."""
    body = dataclasses.asdict(report)
    for work in body["workloads"]:
        work["layers"] = {str(row.pop("layer")): row for row in work["layers"]}
        for row in work["layers"].values():
            del row["usage"]
    return body


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _rate(hits: float, accesses: float) -> float | None:
    return float(hits / accesses) if accesses else None


def _workload(work: WorkloadData) -> WorkloadAnswer:
    infos = [x.info for x in work.layers]
    traced = [x.traced for x in work.layers if x.traced is not None]
    hits = [_hits(x) for x in work.layers]
    largest, least = max(i.n_expert for i in infos), max(i.top_k for i in infos)
    curve = tuple(_rates(work.layers, hits, slots, largest) for slots in range(least, largest + 1))
    at = sorted({max(least, int(largest * f)) - least for f in FRACTIONS})
    gaps = sum((t.reuse.gaps for t in traced), np.zeros(MAX_GAP + 1, np.int64))
    return WorkloadAnswer(
        name=work.name,
        files=tuple(PurePath(f).name for f in work.files),
        is_traced=work.is_traced,
        prompt_tokens=work.prompt_tokens,
        decode_tokens=work.decode_tokens,
        tokens=max(x.tokens for x in work.layers),
        split=_split(work),
        top_share=_mean(top_share(x.selections) for x in work.layers),
        flat_share=sum(top_tenth(i.n_expert) / i.n_expert for i in infos) / len(infos),
        entropy=_mean(entropy(x.selections) for x in work.layers),
        repeat_share=_rate(sum(x.repeats[0] for x in work.layers), sum(x.repeats[1] for x in work.layers)),
        flat_repeat_share=sum(i.top_k / i.n_expert for i in infos) / len(infos),
        cold_share=_cold_share(work),
        gap_tokens={f"{q:g}": gap_quantile(gaps, q) for q in GAP_QUANTILES},
        segments=tuple(_segment(work, i) for i in range(len(SEGMENTS))) if traced else (),
        curve=curve,
        sizes=tuple(curve[i] for i in at),
        enough=tuple(_enough(work)),
        layers=tuple(_layer(x, h) for x, h in zip(work.layers, hits, strict=True)),
    )


def _cold_share(work: WorkloadData) -> float | None:
    layers = [(x.lru_hits, x.accesses) for x in work.layers if x.tokens]
    if any(hits is None or accesses is None for hits, accesses in layers):
        return None
    accesses = sum(a or 0 for _, a in layers)
    return _rate(accesses - sum(int(h[-1]) for h, _ in layers if h is not None), accesses)


def _split(work: WorkloadData) -> str | None:
    """The weakest split of any layer that has rows."""
    kinds = {x.traced.split for x in work.layers if x.traced is not None and x.tokens}
    return BY_TOKEN if BY_TOKEN in kinds else min(kinds, default=None)


def _hits(data: LayerData) -> dict[str, Hits]:
    """Hits of each policy at every size (n_expert + 1,), None where the input does not tell."""
    known, traced = data.accesses is not None, data.traced
    return {
        "random": random_hits(data.accesses, data.info.n_expert) if data.accesses is not None else None,
        "static_held_out": held_out_hits(traced.fold_uses) if traced else None,
        "static_in_sample": static_hits(data.uses, data.uses) if known and data.uses is not None else None,
        "lru": data.lru_hits,
        "belady": traced.belady_hits if traced else None,
    }


def _slots(info: TraceLayer, slots: int, largest: int) -> int:
    """The slots of a layer where the largest one has `slots`."""
    return max(info.top_k, slots * info.n_expert // largest)


def _rates(layers: Sequence[LayerData], hits: Sequence[dict[str, Hits]], slots: int, largest: int) -> Rates:
    """Layers without rows have no say; a policy that is unknown in a layer with rows is unknown."""
    used = [(h, _slots(x.info, slots, largest)) for x, h in zip(layers, hits, strict=True) if x.tokens]
    accesses = sum(x.accesses or 0 for x in layers if x.tokens)
    rates: dict[str, float | None] = {}
    for policy in POLICIES:
        known = [(found, at) for h, at in used if (found := h[policy]) is not None]
        rates[policy] = _rate(sum(float(found[at]) for found, at in known), accesses) if len(known) == len(used) else None
    sizes = [None if x.info.expert_bytes is None else x.info.expert_bytes * _slots(x.info, slots, largest) for x in layers]
    total = None if None in sizes else sum(s or 0 for s in sizes)
    return Rates(slots=slots, fraction=slots / largest, bytes=total, **rates)


def _layer(data: LayerData, hits: dict[str, Hits]) -> LayerAnswer:
    n, traced = data.info.n_expert, data.traced
    total = int(data.selections.sum())
    return LayerAnswer(
        layer=data.info.layer,
        n_expert=n,
        top_k=data.info.top_k,
        tokens=data.tokens,
        top_share=top_share(data.selections),
        entropy=entropy(data.selections),
        repeat_share=_rate(*data.repeats),
        median_gap_tokens=gap_quantile(traced.reuse.gaps, 0.5) if traced else None,
        half=_rates([data], [hits], max(data.info.top_k, int(n * HALF)), n),
        usage=tuple((data.selections * n / total).tolist()) if total else None,
    )


def _segment(work: WorkloadData, place: int) -> SegmentAnswer:
    rows = [x.traced.segments[place] for x in work.layers if x.traced is not None]
    srp = _mean(_rate(s.routing_sum, s.segments) for s in rows)
    return SegmentAnswer(SEGMENTS[place], srp, _rate(sum(s.hits for s in rows), sum(s.accesses for s in rows)))


def _enough(work: WorkloadData) -> Iterable[EnoughAnswer]:
    layers = [(x.info, x.traced) for x in work.layers if x.traced is not None and x.tokens]
    if not layers or any(0 in t.fold_tokens for _, t in layers):
        return
    lengths = [n for n in layers[0][1].prefixes if all(n in t.prefixes for _, t in layers)]
    for tokens in [*lengths, None]:
        hits = accesses = 0
        overlaps = []
        for info, traced in layers:
            made = traced.fold_uses if tokens is None else traced.prefixes[tokens]
            slots = _slots(info, int(info.n_expert * HALF), info.n_expert)
            for part in (0, 1):
                hits += int(static_hits(traced.fold_uses[1 - part], made[part])[slots])
                overlaps.append(top_overlap(made[part], traced.fold_uses[part]))
            accesses += int(traced.fold_uses.sum())
        whole = round(sum(sum(t.fold_tokens) for _, t in layers) / (2 * len(layers)))
        yield EnoughAnswer(whole if tokens is None else tokens, tokens is None, _rate(hits, accesses), _mean(overlaps))


def _pair(one: WorkloadData, other: WorkloadData) -> PairAnswer:
    by_layer = {
        str(a.info.layer): top_overlap(a.selections, b.selections) for a, b in zip(one.layers, other.layers, strict=True)
    }
    return PairAnswer(one.name, other.name, _mean(by_layer.values()), by_layer)


def _transfer(works: Sequence[WorkloadData]) -> TransferAnswer | None:
    """None where a workload has no rows, or only counts of prompts, whose calls are not known."""
    layers = [[x for x in w.layers if x.tokens] for w in works]
    if not all(layers) or any(x.uses is None for row in layers for x in row):
        return None
    held_out = all(x.traced is not None and held_out_hits(x.traced.fold_uses) is not None for row in layers for x in row)
    folds = [[_folds(x) for x in w.layers] for w in works]
    slots = [_slots(x.info, int(x.info.n_expert * HALF), x.info.n_expert) for x in works[0].layers]
    found: Transfer = transfer(folds, slots, held_out=held_out)
    return TransferAnswer(
        fraction=HALF,
        held_out=held_out,
        workloads=tuple(w.name for w in works),
        miss_rates=tuple(tuple(map(_miss, row)) for row in found.hit_rates),
        merged=tuple(map(_miss, found.merged)),
        regrets=found.regrets,
        worst_regret=found.worst_regret,
    )


def _miss(hit_rate: float | None) -> float | None:
    return None if hit_rate is None else 1 - hit_rate


def _folds(data: LayerData) -> npt.NDArray[np.int64]:
    if data.traced is not None:
        return data.traced.fold_uses
    uses = data.uses if data.uses is not None else np.zeros(data.info.n_expert, np.int64)
    return np.stack([uses, np.zeros_like(uses)])


def _missing(measured: Measured) -> Iterable[str]:
    """What the inputs do not tell; workloads that lack the same are named together."""
    lacks: dict[str, list[str]] = {}
    for work in measured.workloads:
        words = _lack(work, measured.view.phase)
        if words:
            lacks.setdefault(words, []).append(work.name)
    return [f"{', '.join(names)}: {words}" for words, names in lacks.items()]


def _lack(work: WorkloadData, phase: str) -> str:
    if not any(x.tokens for x in work.layers):
        other, rows = ("prompt", work.prompt_tokens) if phase == "decode" else ("decode", work.decode_tokens)
        if phase == "all" or not rows:
            return "no tokens"
        return f"no {phase} tokens; --phase {other} shows the {rows} {other} tokens"
    if work.is_traced:
        return ""
    parts = ["Belady", "held-out static sets", "reuse distances", "how many tokens are enough"]
    if work.layers[0].lru_hits is None:
        parts.insert(0, "LRU")
    return f"from a profile; {', '.join(parts[:-1])} and {parts[-1]} need the trace"
