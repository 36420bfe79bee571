"""The figures of a report.  Pure; needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from bel.profiler.answers import Rates, Report, WorkloadAnswer
from bel.profiler.report_tables import POLICY_NAMES
from bel.profiler.svg import INK, LINE, MUTED, Drawing, draw
from bel.profiler.verdicts import DASH, enough_tokens, percent, points

POLICY_COLOURS = {
    "belady": "#2a9a63",
    "lru": "#2f7ed8",
    "static_in_sample": "#b9770e",
    "static_held_out": "#c2410c",
    "random": "#78808a",
}
Share = Callable[[WorkloadAnswer], float | None]
WORK_COLOURS = ("#3f74c0", "#c8553d", "#4b9b6a", "#8d6bbd", "#b58a2e", "#3d9ea6")
MAX_HEAT = 3.0  # times the flat share; hotter experts look the same
MAX_LABEL_CHARS = 24


def percent_axis(axis: Any, label: str) -> None:
    """Shares on an axis, shown in percent."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f}"))
    axis.set_label_text(label)


def end_labels(axes: Axes, ends: Sequence[tuple[float, str, str]], x: float) -> None:
    """Labels right of `x` at the heights of their lines, moved apart where they would overlap; (height, text, colour)."""
    low, high = axes.get_ylim()
    rows = sorted(ends)
    for (_, text, colour), at in zip(rows, _apart([h for h, _, _ in rows], 0.06 * (high - low)), strict=True):
        axes.annotate(text, (x, at), (7, 0), textcoords="offset points", color=colour, va="center", annotation_clip=False)


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights, moved as little as it takes to be `gap` apart: those that touch spread round their middle."""
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _edge(groups[-1], gap, -1) < _edge(groups[-2], gap, 1) + gap:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_edge(g, gap, -1) + i * gap for g in groups for i in range(len(g))]


def _edge(group: Sequence[float], gap: float, side: int) -> float:
    return sum(group) / len(group) + side * gap * (len(group) - 1) / 2


def _spread(values: Iterable[float | None]) -> str:
    """'21.5 %', or '21.5 to 28.2 %'."""
    known = sorted(v for v in values if v is not None)
    if not known:
        return DASH
    low, high = percent(known[0], 0), percent(known[-1], 0)
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


def cut_name(name: str) -> str:
    """The name of a workload or policy, cut: a longer one would leave no room for the figure."""
    return name if len(name) <= MAX_LABEL_CHARS else name[: MAX_LABEL_CHARS - 3] + "..."


def _colour(place: int) -> str:
    return WORK_COLOURS[place % len(WORK_COLOURS)]


def hot_figure(report: Report) -> Drawing | None:
    """The share of the top 10 % and the LRU hits of each workload, beside what flat and random usage would give."""
    measures: list[tuple[str, Share, Share]] = [
        ("top 10 % of the experts,\nshare of the selections", lambda w: w.top_share, lambda w: w.flat_share),
        ("used again\nby the next token", lambda w: w.repeat_share, lambda w: w.flat_repeat_share),
        ("LRU hits with half\nof the experts", lambda w: w.half.lru, lambda w: w.half.random),
    ]
    works = [w for w in report.workloads if w.top_share is not None]
    measures = [m for m in measures if any(m[1](w) is not None for w in works)]
    if not works:
        return None

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        step = 0.8 / len(works)
        for row, (_, value, chance) in enumerate(measures):
            for place, work in enumerate(works):
                at, share = row - 0.4 + (place + 0.5) * step, value(work)
                if share is None:
                    continue
                axes.barh(at, share, step * 0.86, color=_colour(place))
                axes.annotate(
                    f"{cut_name(work.name)} {percent(share)}", (share, at), (5, 0), textcoords="offset points", va="center"
                )
            flat = chance(works[0])
            if flat is not None:
                axes.plot([flat, flat], [row - 0.44, row + 0.44], color=INK, linewidth=1.6)
                axes.annotate(f"by chance {percent(flat)}", (flat, row + 0.46), color=MUTED, va="top", ha="center", fontsize=9)
        axes.set_yticks(range(len(measures)), [m[0] for m in measures], color=INK)
        axes.set_ylim(len(measures) - 0.3, -0.55)
        axes.set_xlim(0, 1.12)
        axes.set_xticks(np.arange(0, 1.01, 0.2))
        axes.grid(visible=False, axis="y")
        percent_axis(axes.xaxis, "share of the selections or of the accesses, %")

    lru = [w.half.lru for w in works]
    title = f"The top tenth of the experts carries {_spread(w.top_share for w in works)} of the selections"
    if any(x is not None for x in lru):
        title += f"; the half used last serves {_spread(lru)}"
    return draw(title, 8.2, 1.1 + len(measures) * (0.55 + 0.24 * len(works)), paint)


def curve_figure(work: WorkloadAnswer) -> Drawing | None:
    """Hit rate over size for every policy."""
    half = work.half
    known = [policy for policy in POLICY_COLOURS if getattr(half, policy) is not None]
    if len(known) < 2:
        return None

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        x = [r.fraction for r in work.curve]
        for policy in known:
            y = [getattr(r, policy) for r in work.curve]
            dash = "--" if policy in ("random", "static_in_sample") else "-"
            axes.plot(x, y, dash, color=POLICY_COLOURS[policy], marker="o" if len(x) == 1 else None)
            axes.plot(half.fraction, getattr(half, policy), "o", color=POLICY_COLOURS[policy], markersize=5)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.02)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
        percent_axis(axes.xaxis, f"experts resident, % (100 % = {half.slots / half.fraction:.0f} slots a layer)")
        percent_axis(axes.yaxis, "hit rate, %")
        axes.text(0.985, 0.055 + 0.068 * len(known), f"at {half.slots} slots", color=MUTED, ha="right", fontsize=9.5)
        for row, policy in enumerate(reversed(known)):
            text = f"{POLICY_NAMES[policy]}  {percent(getattr(half, policy))}"
            axes.text(0.985, 0.04 + 0.068 * row, text, color=POLICY_COLOURS[policy], ha="right", weight="bold")

    return draw(f"{work.name}: {_curve_finding(half)}", 5.9, 4.3, paint)


def _curve_finding(half: Rates) -> str:
    lru, static = half.lru, half.static_held_out if half.static_held_out is not None else half.static_in_sample
    if lru is None or static is None:
        return "hit rate by size"
    ahead = "LRU ahead of" if lru > static + 0.005 else "LRU behind" if lru < static - 0.005 else "LRU level with"
    gap = f", {points(half.belady - lru)} below Belady" if half.belady is not None else ""
    return f"{ahead} a static set at half size{gap}"


def layer_figure(work: WorkloadAnswer) -> Drawing | None:
    """Hit rates of each layer with half of its experts."""
    policies = [p for p in POLICY_COLOURS if any(getattr(x.half, p) is not None for x in work.layers)]
    if len(work.layers) < 2 or not policies:
        return None
    lru = [(x.half.lru, x.layer) for x in work.layers if x.half.lru is not None]

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        known = [getattr(x.half, p) for x in work.layers for p in policies if getattr(x.half, p) is not None]
        axes.set_ylim(max(0, int(10 * min(known) - 0.5) / 10), 1.02)
        ends = []
        for policy in policies:
            line = [(x.layer, getattr(x.half, policy)) for x in work.layers if getattr(x.half, policy) is not None]
            dash = "--" if policy in ("random", "static_in_sample") else "-"
            size = 4 if len(line) < 40 and dash == "-" else 0
            axes.plot(*zip(*line, strict=True), dash, marker="o", markersize=size, color=POLICY_COLOURS[policy])
            ends.append((line[-1][1], POLICY_NAMES[policy], POLICY_COLOURS[policy]))
        axes.set_xlim(work.layers[0].layer - 0.3, work.layers[-1].layer + 0.3)
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        axes.set_xlabel("layer")
        percent_axis(axes.yaxis, "hit rate with half of the experts, %")
        end_labels(axes, ends, work.layers[-1].layer + 0.3)

    title = f"{work.name}: hit rates by layer"
    if lru:
        low, high = min(lru), max(lru)
        title = f"{work.name}: layer {low[1]} is the hardest for LRU ({percent(low[0], 0)}), layer {high[1]} the easiest "
        title += f"({percent(high[0], 0)})"
    return draw(title, 5.9, 3.9, paint)


def usage_figure(report: Report) -> Drawing | None:
    """Use of every expert in every layer, experts in the order of their use in the first workload."""
    works = [w for w in report.workloads if any(x.usage for x in w.layers)]
    if not works:
        return None
    width = max(x.n_expert for x in works[0].layers)
    orders = [np.argsort(-np.array(x.usage), kind="stable") if x.usage else np.arange(x.n_expert) for x in works[0].layers]

    def paint(figure: Figure) -> None:
        panels = figure.subplots(1, len(works), sharey=True, squeeze=False)[0]
        for axes, work in zip(panels, works, strict=True):
            heat = np.full((len(orders), width), np.nan)
            for row, (layer, order) in enumerate(zip(work.layers, orders, strict=True)):
                if layer.usage:
                    heat[row, : layer.n_expert] = np.array(layer.usage)[order]
            axes.imshow(heat, aspect="auto", interpolation="nearest", cmap="YlGnBu", vmin=0, vmax=MAX_HEAT)
            axes.grid(visible=False)
            axes.set_title(cut_name(work.name), fontsize=10.5, color=INK, loc="left")
            axes.set_xlabel(f"experts, the most used in {cut_name(works[0].name)} first")
        rows = np.unique(np.linspace(0, len(orders) - 1, min(len(orders), 13)).astype(int))
        panels[0].set_yticks(rows, [str(works[0].layers[r].layer) for r in rows])
        panels[0].set_ylabel("layer")
        bar = figure.colorbar(panels[0].images[0], ax=list(panels), pad=0.01, fraction=0.035)
        bar.set_label("times the flat share")
        bar.outline.set_edgecolor(LINE)

    return draw(_usage_finding(report, works), 9.6, max(2.6, min(6.0, 1.5 + 0.14 * len(orders))), paint)


def _usage_finding(report: Report, works: Sequence[WorkloadAnswer]) -> str:
    shares = [p.top_half_overlap for p in report.pairs if p.top_half_overlap is not None]
    if shares:
        return f"The more used halves of two workloads share {_spread(shares)} of their experts (50 % by chance)"
    return f"{works[0].name}: the top tenth of the experts carries {percent(works[0].top_share)} of the selections"


def enough_figure(report: Report) -> Drawing | None:
    """Held-out hit rate of a static half over the length of the profile."""
    works = [(i, w) for i, w in enumerate(report.workloads) if len([e for e in w.enough if e.hit_rate is not None]) > 1]
    if not works:
        return None

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        rates = [e.hit_rate for _, w in works for e in w.enough if e.hit_rate is not None]
        floor = min(rates) - 0.25 * (max(rates) - min(rates) + 0.02)
        axes.set_ylim(max(0, floor), min(1.01, max(rates) + 0.25 * (max(rates) - floor)))
        last = max(w.enough[-1].tokens for _, w in works)
        for place, work in works:
            line = [(e.tokens, e.hit_rate) for e in work.enough if e.hit_rate is not None]
            axes.plot(*zip(*line, strict=True), "-o", markersize=5, color=_colour(place))
            axes.plot([work.enough[-1].tokens, last], [line[-1][1]] * 2, ":", color=_colour(place), linewidth=1)
        ends = [(w.enough[-1].hit_rate or 0.0, f"{cut_name(w.name)}, all {w.enough[-1].tokens}", _colour(i)) for i, w in works]
        axes.set_xscale("log")
        ticks = sorted({e.tokens for _, w in works for e in w.enough if not e.is_whole})
        axes.set_xticks(ticks, [f"{t:,}".replace(",", "\u2009") for t in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(ticks[0] * 0.9 if ticks else None, last * 1.06)
        axes.set_xlabel("tokens of profile")
        percent_axis(axes.yaxis, "held-out hit rate of a static half, %")
        end_labels(axes, ends, last * 1.06)

    found = [(w.name, enough_tokens(w)) for _, w in works]
    parts = [f"{name} {'more than ' if e.is_whole else ''}{e.tokens}" for name, e in found if e]
    return draw(f"Tokens until the profile is as good as the whole: {', '.join(parts)}", 8.2, 3.7, paint)
