"""The tables of a report as text, the same for a terminal and for a page.  Pure."""

from __future__ import annotations

from collections.abc import Iterable

from bel.formats.units import format_bytes
from bel.profiler.answers import Report, WorkloadAnswer
from bel.profiler.table import Table
from bel.profiler.verdicts import DASH, percent, points

POLICY_NAMES = {
    "random": "random set",
    "static_held_out": "static, held out",
    "static_in_sample": "static, in-sample",
    "lru": "LRU",
    "belady": "Belady",
}


def phase_words(report: Report) -> str:
    """Which calls count."""
    what = {"decode": "decode tokens", "prompt": "prompt tokens", "all": "prompt and decode tokens"}[report.phase]
    if report.one_by_one and report.phase != "decode":
        return f"{what}, prompts one token at a time"
    return what if report.phase == "decode" else f"{what}, prompts ubatch by ubatch"


def work_table(report: Report) -> Table:
    """What was read, and how uneven and how local it is."""
    rows = [
        (
            w.name,
            f"{len(w.files)} trace{'s' if len(w.files) > 1 else ''}" if w.is_traced else "profile",
            str(w.prompt_tokens),
            str(w.decode_tokens),
            percent(w.top_share),
            percent(w.flat_share),
            number(w.entropy),
            percent(w.repeat_share),
            percent(w.flat_repeat_share),
        )
        for w in report.workloads
    ]
    columns = (
        "workload",
        "from",
        "prompt tokens",
        "decode tokens",
        "top 10 %",
        "if flat",
        "entropy",
        "used again",
        "by chance",
    )
    note = (
        "top 10 %: share of the selections that the most used tenth of the experts carries. used again: by the next token. "
        "entropy: 1 is flat. Means over the layers."
    )
    return Table(f"Usage over the run ({phase_words(report)})", columns, tuple(rows), note, labels=2)


def size_table(report: Report) -> Table:
    """Hit rates of every policy at a quarter, half and three quarters of the experts."""
    rows = [
        (
            w.name,
            f"{percent(r.fraction, 0)}",
            str(r.slots),
            DASH if r.bytes is None else format_bytes(r.bytes),
            *(percent(getattr(r, policy)) for policy in POLICY_NAMES),
        )
        for w in report.workloads
        for r in w.sizes
    ]
    columns = ("workload", "of the experts", "slots a layer", "all slots", *POLICY_NAMES.values())
    return Table("Hit rates by size", columns, tuple(rows), " ".join(split_words(report)))


def split_words(report: Report) -> Iterable[str]:
    """How the work was split for what is held out."""
    yield "random set: what a set drawn at random is expected to hit. Sets are loaded beforehand; LRU and Belady start empty"
    colds = [f"{percent(w.cold_share)} of {w.name}" for w in report.workloads if w.cold_share is not None]
    yield f"and miss first uses ({', '.join(colds)})." if colds else "and miss first uses."
    for split in sorted({w.split for w in report.workloads if w.split}):
        names = ", ".join(w.name for w in report.workloads if w.split == split)
        yield f"Held out ({names}): the set for one half of the {_units(split)} is made from the other half, both ways."


def _units(split: str) -> str:
    return "tokens (there is only one prompt to split)" if split == "token halves" else split


def layer_table(work: WorkloadAnswer) -> Table:
    """One row for each layer, hit rates with half of the experts."""
    is_mixed = len({x.n_expert for x in work.layers}) > 1
    rows = [
        (
            str(x.layer),
            *([str(x.n_expert)] if is_mixed else []),
            percent(x.top_share),
            number(x.entropy),
            percent(x.repeat_share),
            DASH if x.median_gap_tokens is None else str(x.median_gap_tokens),
            *(percent(getattr(x.half, policy)) for policy in POLICY_NAMES if policy != "random"),
        )
        for x in work.layers
    ]
    heads = [name for policy, name in POLICY_NAMES.items() if policy != "random"]
    counts = ("experts",) if is_mixed else ()
    columns = ("layer", *counts, "top 10 %", "entropy", "used again", "median gap", *heads)
    note = "Hit rates with half of the experts resident. median gap: tokens between two uses of an expert."
    return Table(f"Layers: {work.name}", columns, tuple(rows), note)


def overlap_table(report: Report) -> Table | None:
    """Overlap of the top halves of all pairs."""
    if not report.pairs:
        return None
    rows = [
        (p.one, p.other, percent(p.top_half_overlap), *_range([v for v in p.by_layer.values() if v is not None]))
        for p in report.pairs
    ]
    columns = ("workload", "and", "shared top half", "least, in a layer", "most, in a layer")
    return Table("Overlap", tuple(columns), tuple(rows), "Two random halves share 50 %.", labels=2)


def _range(values: list[float]) -> tuple[str, str]:
    return (percent(min(values)), percent(max(values))) if values else (DASH, DASH)


def transfer_table(report: Report) -> Table | None:
    """The transfer matrix: miss rates of static halves, by the workload that they were made from."""
    found = report.transfer
    if found is None:
        return None
    rows = [(name, *map(percent, costs)) for name, costs in zip(found.workloads, found.miss_rates, strict=True)]
    rows.append(("all, equal weights", *map(percent, found.merged)))
    rows.append(("regret of the merge", *(DASH if r is None else points(r) for r in found.regrets)))
    how = "held out: made from the other part of the work" if found.held_out else "in-sample: made from the work they serve"
    note = f"Rows: the workload that the set was made from. Columns: the one that it serves. {how.capitalize()}."
    columns = ("made from", *(f"on {name}" for name in found.workloads))
    return Table("Miss rates of a static half", columns, tuple(rows), note)


def enough_table(report: Report) -> Table | None:
    """Short profiles against the whole one."""
    works = [w for w in report.workloads if w.enough]
    if not works:
        return None
    rows = [
        (w.name, "all " + str(e.tokens) if e.is_whole else str(e.tokens), percent(e.hit_rate), percent(e.top_half_overlap))
        for w in works
        for e in w.enough
    ]
    columns = ("workload", "tokens of profile", "hit rate, held out", "same top half")
    note = (
        "A static half made from the first tokens of one part of the work: what it hits on the other part, and how much "
        "of it is in the half made from that whole part."
    )
    return Table("How many tokens are enough", columns, tuple(rows), note)


def reuse_table(report: Report) -> Table | None:
    """How soon experts are used again."""
    works = [w for w in report.workloads if w.is_traced]
    if not works:
        return None
    heads = [percent(float(q), 0) for q in works[0].gap_tokens]
    rows = [(w.name, *(DASH if gap is None else str(gap) for gap in w.gap_tokens.values())) for w in works]
    return Table("Tokens until an expert is used again, by share of the uses", ("workload", *heads), tuple(rows))


def segment_table(report: Report) -> Table | None:
    """SRP and SCH."""
    works = [w for w in report.workloads if w.is_traced]
    if not works:
        return None
    sizes = [s.tokens for s in works[0].segments]
    rows = [(w.name, *(number(s.srp) for s in w.segments), *(percent(s.sch) for s in w.segments)) for w in works]
    columns = ("workload", *(f"SRP {m}" for m in sizes), *(f"SCH {m}" for m in sizes))
    note = (
        "SRP m: best F1 score of one set of experts for all of m successive tokens. SCH m: hit rate with half of the experts "
        "when the next m tokens are known."
    )
    return Table("Segments of successive tokens", columns, tuple(rows), note)


def number(value: float | None) -> str:
    """Three decimals, or a dash."""
    return DASH if value is None else f"{value:.3f}"


def all_tables(report: Report) -> tuple[Table, ...]:
    """Every table that has an answer, in order."""
    layers = [layer_table(w) for w in report.workloads]
    tables = [work_table(report), size_table(report), *layers, overlap_table(report), transfer_table(report)]
    tables += [enough_table(report), reuse_table(report), segment_table(report)]
    return tuple(t for t in tables if t is not None and t.rows)
