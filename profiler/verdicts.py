"""The answers of a report as sentences: one question, one sentence, the numbers in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bel.profiler.answers import EnoughAnswer, LayerAnswer, Report, WorkloadAnswer

DASH = "\N{EN DASH}"
"""What stands for a quantity without data."""
FLAT_RATIO, SKEWED_RATIO = 1.5, 3.0
"""Share of the top 10 % over its flat value: below the first usage is flat, above the second skewed."""
HOT_POINTS = 0.1  # how far LRU at half size must be above a random half for usage to be called hot in the moment
POINTLESS_RATIO = 1.1  # held-out static over random below which a static set is called pointless
SAME_POINTS = 0.005  # hit rates this near are called equal
ENOUGH_POINTS = 0.01  # a short profile is enough when it reaches the whole one's held-out hit rate within this


@dataclass(frozen=True, slots=True)
class Verdict:
    """A question and its answers, a sentence or two for each workload."""

    question: str
    answers: tuple[str, ...]


def percent(share: float | None, digits: int = 1) -> str:
    """A fraction as '18.7 %', or a dash."""
    return DASH if share is None else f"{100 * share:.{digits}f} %"


def points(difference: float) -> str:
    """A difference of rates as '1.3 points'."""
    shown = f"{100 * difference:.1f}"
    return f"{shown} point" if shown == "1.0" else f"{shown} points"


def verdicts(report: Report) -> tuple[Verdict, ...]:
    """What the report says, in the order of its questions; questions without an answer are left out."""
    rows: list[Verdict] = []
    for question, make in (
        ("Flat over the run, hot in the moment?", hot_or_flat),
        ("Which layers are which?", layer_words),
    ):
        rows += _joined(question, [make(w) for w in report.workloads])
    rows += _joined("How far do the workloads overlap?", overlap_words(report))
    rows += _joined("What would a static set, LRU and Belady hit?", [policy_words(w) for w in report.workloads])
    rows += _joined("What does a set made for other work cost?", [transfer_words(report)])
    rows += _joined("How many tokens of profile are enough?", [enough_words(w) for w in report.workloads])
    return tuple(rows)


def _joined(question: str, answers: Iterable[str | None]) -> list[Verdict]:
    known = tuple(a for a in answers if a)
    return [Verdict(question, known)] if known else []


def hot_or_flat(work: WorkloadAnswer) -> str | None:
    """Share of the top 10 % against the LRU hits."""
    if work.top_share is None:
        return None
    ratio = work.top_share / work.flat_share
    over = "flat" if ratio < FLAT_RATIO else "uneven" if ratio < SKEWED_RATIO else "skewed"
    top = f"the top 10 % of the experts carry {percent(work.top_share)} of the selections ({percent(work.flat_share)} if flat)"
    half = work.half
    if half.lru is None or half.random is None:
        return f"{work.name}: {over} over the run: {top}."
    is_hot = half.lru - half.random >= HOT_POINTS
    moment = "hot in the moment" if is_hot else "not hot in the moment"
    join = "and" if (over != "flat") == is_hot else "but"
    return (
        f"{work.name}: {over} over the run {join} {moment}: {top}, "
        f"and LRU with {half.slots} slots a layer hits {percent(half.lru)} (a random set {percent(half.random)})."
    )


def layer_words(work: WorkloadAnswer) -> str | None:
    """The layers that are easiest and hardest for a cache, or most and least uneven where hits are unknown."""
    known = [x for x in work.layers if x.half.lru is not None]
    if len(known) > 1:
        easy, hard = max(known, key=_lru), min(known, key=_lru)
        return (
            f"{work.name}: layer {hard.layer} is the hardest to cache (LRU at half size {percent(hard.half.lru)}), "
            f"layer {easy.layer} the easiest ({percent(easy.half.lru)})."
        )
    shares = [x for x in work.layers if x.top_share is not None]
    if len(shares) < 2:
        return None
    most, least = max(shares, key=lambda x: x.top_share or 0), min(shares, key=lambda x: x.top_share or 0)
    return (
        f"{work.name}: layer {most.layer} is the most uneven (top 10 %: {percent(most.top_share)}), "
        f"layer {least.layer} the flattest ({percent(least.top_share)})."
    )


def _lru(layer: LayerAnswer) -> float:
    return layer.half.lru or 0.0


def overlap_words(report: Report) -> list[str]:
    """Overlap of the top halves of each pair."""
    words = []
    for pair in report.pairs:
        share = pair.top_half_overlap
        if share is None:
            continue
        what = "the same experts" if share > 0.75 else "partly the same experts" if share > 0.55 else "different experts"
        if 0.45 <= share <= 0.55:
            what = "experts as different as chance makes them"
        words.append(f"{pair.one} and {pair.other} share {percent(share, 0)} of their top halves (50 % by chance): {what}.")
    return words


def policy_words(work: WorkloadAnswer) -> str | None:
    """Hit rates at half size, and whether a static set is worth it."""
    half = work.half
    if half.lru is None and half.static_in_sample is None:
        return None
    parts = [f"LRU {percent(half.lru)}"] if half.lru is not None else []
    if half.static_held_out is not None:
        parts.append(f"a static set {percent(half.static_held_out)} held out ({percent(half.static_in_sample)} in-sample)")
    elif half.static_in_sample is not None:
        parts.append(f"a static set {percent(half.static_in_sample)} in-sample")
    if half.belady is not None:
        parts.append(f"the best cache that starts empty {percent(half.belady)} (Belady)")
    words = f"{work.name}, {half.slots} slots a layer: {', '.join(parts)}; a random set {percent(half.random)}."
    return f"{words} {_advice(half.lru, half.static_held_out, half.random)}".strip()


def _advice(lru: float | None, held_out: float | None, random: float | None) -> str:
    if held_out is None or not random:
        return ""
    if held_out / random < POINTLESS_RATIO:
        return "A static set is pointless here: it hardly beats a random one."
    if lru is None:
        return ""
    if abs(lru - held_out) < SAME_POINTS:
        return "LRU and a static set are level."
    if lru > held_out:
        return f"LRU is {points(lru - held_out)} better than the static set."
    return f"The static set is {points(held_out - lru)} better than LRU."


def transfer_words(report: Report) -> str | None:
    """Cost of another workload's set, and of the merge."""
    found = report.transfer
    if found is None or found.worst_regret is None:
        return None
    n = len(found.workloads)
    pairs = [(found.miss_rates[i][j], i, j) for i in range(n) for j in range(n) if i != j]
    known = [(cost, i, j) for cost, i, j in pairs if cost is not None]
    if not known:
        return None
    cost, i, j = max(known)
    worst = found.regrets.index(found.worst_regret)
    how = "held out" if found.held_out else "in-sample"
    merge = (
        f"a merged one costs {found.workloads[worst]} {points(found.worst_regret)}, the worst regret"
        if found.worst_regret > 0
        else "a merged one costs nobody anything"
    )
    return (
        f"A static half made from {found.workloads[i]} misses {percent(cost)} on {found.workloads[j]}, "
        f"its own {percent(found.miss_rates[j][j])} ({how}); {merge}."
    )


def enough_tokens(work: WorkloadAnswer) -> EnoughAnswer | None:
    """The shortest profile that is as good as the whole one, as all longer ones are too."""
    best = None
    for row in reversed(work.enough):
        if row.hit_rate is None or row.hit_rate < (work.enough[-1].hit_rate or 0) - ENOUGH_POINTS:
            break
        best = row
    return best


def enough_words(work: WorkloadAnswer) -> str | None:
    """How few tokens suffice."""
    enough = enough_tokens(work)
    if enough is None:
        return None
    whole = work.enough[-1]
    if len(work.enough) == 1:
        return f"{work.name}: each part of the work has only {whole.tokens} tokens, too few to tell: record more."
    if enough.is_whole:
        before = f"{work.enough[-2].tokens} tokens reach {percent(work.enough[-2].hit_rate)}"
        return (
            f"{work.name}: no shorter profile matches all {whole.tokens} tokens, which hit {percent(whole.hit_rate)} "
            f"held out ({before}): record more."
        )
    return (
        f"{work.name}: {enough.tokens} tokens are enough: a static half made from them hits {percent(enough.hit_rate)} on "
        f"the other part of the work, one made from all {whole.tokens} {percent(whole.hit_rate)}."
    )
