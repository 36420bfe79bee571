"""The figures of a simulation: what each policy reaches with each size of cache.  Pure; needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bel.formats.units import GIB, MIB, format_bytes
from bel.profiler.figures import cut_name, percent_axis
from bel.profiler.simulate import BELADY, EARLIER, LRU, ORACLE, Policy, Row, Simulated
from bel.profiler.simulate_tables import shown_knees
from bel.profiler.svg import INK, MUTED, Drawing, draw
from bel.profiler.verdicts import percent, points

RANDOM = "random"
MAX_POLICIES = 12  # more lines cannot be told apart
_KNOWN = {BELADY: "#2a9a63", LRU: "#2f7ed8", RANDOM: "#78808a", ORACLE: "#b9770e", EARLIER: "#c2410c"}
_COLOURS = (
    "#d6336c",
    "#7b4fc9",
    "#0b9aa8",
    "#a3432b",
    "#8a9a1b",
    "#1f3f94",
    "#c77dd6",
    "#5c3d1e",
    "#e8863a",
    "#4d5a68",
    "#8b1a55",
)
Value = Callable[[Row], float | None]


def hit_figure(result: Simulated) -> Drawing | None:
    """Hit rate over size, with the knee of each policy marked."""

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        least = min(row.hit_rate for row in result.rows if row.hit_rate is not None)
        axes.set_ylim(int(10 * least) / 10, 1.02)
        percent_axis(axes.yaxis, "hit rate, %")
        _lines(axes, result, lambda row: row.hit_rate, percent, is_more_better=True)
        for policy, row in shown_knees(result).items():
            if policy in _policies(result) and row.hit_rate is not None:
                axes.plot(
                    _x(row, result), row.hit_rate, "o", markersize=11, fillstyle="none", color=_style(policy, result)["color"]
                )
        if shown_knees(result):
            axes.plot([], [], "o", markersize=11, fillstyle="none", color=INK, label="knee: within 10 % of the policy's best")
            axes.legend(loc="lower right", frameon=False)

    return _drawn(_hit_finding(result), result, lambda row: row.hit_rate, paint)


def _hit_finding(result: Simulated) -> str:
    """The knee of LRU, or of the first policy, in words."""
    row = _reference(result)
    if not shown_knees(result) or row.hit_rate is None:
        return "Hit rate by size of the cache"
    best = next((r for r in result.rows if r.policy == BELADY and r.size == row.size and r.hit_rate is not None), None)
    title = f"{cut_name(row.policy)} has its knee at {_size(row)}: {percent(row.hit_rate)} hits"
    if best is None or best.hit_rate is None or row.policy == BELADY:
        return title
    gap = best.hit_rate - row.hit_rate
    return f"{title}, {points(abs(gap))} {'below' if gap >= 0 else 'above'} Belady"


def _size(row: Row) -> str:
    if row.slots_bytes is not None:
        return format_bytes(row.slots_bytes)
    return f"{row.size} {'slots' if row.experts is None else 'experts'}"


def time_figure(result: Simulated) -> Drawing | None:
    """Milliseconds per token over size, where they are priced."""
    clock = result.setup.clock
    if clock is None:
        return None
    compute = float(clock.layer_s.sum()) * 1e3

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        values = [row.per_token(row.found.seconds) or 0.0 for row in result.rows]
        axes.set_ylim(0, 1.08 * max(1e3 * max(values), compute))
        axes.axhline(compute, linestyle=":", color=INK, linewidth=1.2)
        axes.annotate("compute alone", (0.01, compute), (0, -4), xycoords=("axes fraction", "data"),
                      textcoords="offset points", va="top", color=INK, fontsize=9)  # fmt: skip
        axes.set_ylabel("ms per token")
        _lines(axes, result, _milliseconds, lambda ms: f"{ms:.2f} ms")

    title = f"Time per token by the clock {clock.kind}; {compute:.2f} ms of it are compute"
    return _drawn(title, result, _milliseconds, paint)


def _milliseconds(row: Row) -> float | None:
    seconds = row.per_token(row.found.seconds)
    return None if seconds is None else 1e3 * seconds


def read_figure(result: Simulated) -> Drawing | None:
    """MiB from NVMe per token over size."""

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.set_ylim(0, 1.08 * max((_mib(row) or 0.0 for row in result.rows), default=1.0) or 1.0)
        axes.set_ylabel("MiB per token")
        _lines(axes, result, _mib, lambda mib: f"{mib:.2f} MiB")

    behind = "" if result.setup.host is None else f", with {result.setup.host_tier} RAM behind the cache"
    return _drawn(f"Bytes read from NVMe for each token{behind}", result, _mib, paint)


def _mib(row: Row) -> float | None:
    amount = row.per_token(row.found.nvme_bytes)
    return None if amount is None else amount / MIB


def _drawn(title: str, result: Simulated, value: Value, paint: Callable[[Figure], None]) -> Drawing | None:
    known = [row for row in result.rows if value(row) is not None]
    return draw(title, 8.2, 4.3, paint) if known else None


def _policies(result: Simulated) -> list[str]:
    return list(dict.fromkeys(row.policy for row in result.rows))[:MAX_POLICIES]


def _style(policy: str, result: Simulated) -> dict[str, Any]:
    """The colour and the dashes of a policy: fixed sets and what is drawn at random are dashed."""
    dash = "--" if policy == RANDOM or Policy(policy).is_set else "-"
    others = [p for p in _policies(result) if p not in _KNOWN]
    colour = _KNOWN[policy] if policy in _KNOWN else _COLOURS[others.index(policy) % len(_COLOURS)]
    return {"linestyle": dash, "color": colour}


def _lines(axes: Axes, result: Simulated, value: Value, show: Callable[[float], str], *, is_more_better: bool = False) -> None:
    """A line for each policy over the sizes; beside them their names and values at one size, the best first."""
    at = _reference(result)
    named: list[tuple[float, str]] = []
    for policy in _policies(result):
        own = sorted((row for row in result.rows if row.policy == policy), key=lambda row: row.size)
        line = [(_x(row, result), y) for row in own if (y := value(row)) is not None]
        if line:
            axes.plot(*zip(*line, strict=True), marker="o", markersize=4, **_style(policy, result))
        named += [(y, policy) for row in own if row.size == at.size and (y := value(row)) is not None]
    axes.set_xlim(0, max(_x(row, result) for row in result.rows) * 1.02 or 1)
    axes.set_xlabel(_x_label(result.rows))
    axes.axvline(_x(at, result), color=MUTED, linewidth=0.9, zorder=0)
    _say_beside(axes, f"at {_size(at)}", MUTED, 0)
    for place, (y, policy) in enumerate(sorted(named, reverse=is_more_better)):
        _say_beside(axes, f"{show(y)} {cut_name(policy)}", _style(policy, result)["color"], place + 1)


def _say_beside(axes: Axes, text: str, colour: str, place: int) -> None:
    axes.annotate(text, (1, 1 - 0.066 * place), (8, 0), xycoords="axes fraction", textcoords="offset points",
                  va="top", color=colour, weight="bold" if place else "normal", annotation_clip=False)  # fmt: skip


def _reference(result: Simulated) -> Row:
    """The row whose size the figures speak of: the knee of LRU, else that of the first policy, else the first row."""
    found = shown_knees(result)
    return found.get(LRU) or next(iter(found.values()), result.rows[0])


def _x_label(rows: Sequence[Row]) -> str:
    if rows[0].slots_bytes is None:
        return "slots of all layers" if rows[0].slots_by_layer is not None else "experts in the cache"
    return f"all slots, {_unit(rows)[0]}"


def _unit(rows: Sequence[Row]) -> tuple[str, int]:
    most = max(row.size for row in rows)
    return ("GiB", GIB) if most >= GIB else ("MiB", MIB) if most >= MIB else ("bytes", 1)


def _x(row: Row, result: Simulated) -> float:
    return row.size / _unit(result.rows)[1] if row.slots_bytes is not None else float(row.size)
