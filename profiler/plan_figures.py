"""The figures of a plan: slots of each layer, and where the time of a token goes.  Pure; needs matplotlib."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bel.formats.plan import HELD_OUT, IN_SAMPLE, RANDOM, UNIFORM
from bel.profiler.make_plan import Planned
from bel.profiler.plan_tables import COLUMN_NAMES
from bel.profiler.svg import INK, MUTED, Drawing, draw
from bel.profiler.verdicts import percent

PLAN_COLOUR, UNIFORM_COLOUR = "#2f7ed8", "#b9770e"
COMPUTE_COLOUR, STALL_COLOUR, LINK_COLOUR = "#2a9a63", "#c8553d", "#8d6bbd"
TIMED = (IN_SAMPLE, HELD_OUT, UNIFORM, RANDOM)


def slot_figure(planned: Planned) -> Drawing:
    """Slots of each layer in the plan, and uniform ones of the same bytes."""
    layers = planned.plan.layers
    places = range(len(layers))

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.bar(places, [x.slots for x in layers], 0.8, color=PLAN_COLOUR, label="this plan")
        edges = [place + side for place in places for side in (-0.5, 0.5)]
        uniform = [slots for slots in planned.uniform for _ in range(2)]
        axes.plot(edges, uniform, color=UNIFORM_COLOUR, label="uniform slots of the same bytes")
        floor = [x.top_k for x in layers for _ in range(2)]
        axes.plot(edges, floor, ":", color=INK, linewidth=1.2, label="top-k: what a token uses")
        axes.set_xlim(-0.6, len(layers) - 0.4)
        axes.set_ylim(0, 1.28 * max(*(x.slots for x in layers), *planned.uniform))
        axes.xaxis.set_major_locator(MaxNLocator(16, integer=True))
        axes.xaxis.set_major_formatter(lambda at, _: str(layers[round(at)].layer) if 0 <= at < len(layers) else "")
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("layer")
        axes.set_ylabel("slots")
        axes.legend(loc="upper right", frameon=False, ncols=3)

    return draw(_slot_finding(planned), 9.6, 3.6, paint)


def _slot_finding(planned: Planned) -> str:
    slots = [(x.slots, x.layer) for x in planned.plan.layers]
    low, high = min(slots), max(slots)
    if planned.is_uniform:
        return "The plan has uniform slots: no other way to share these bytes out does better"
    if low[0] == high[0]:
        return f"Every layer gets {low[0]} slots"
    return f"From {low[0]} slots in layer {low[1]} to {high[0]} in layer {high[1]}"


def time_figure(planned: Planned) -> Drawing | None:
    """For the plan and what it is compared with: compute and stall of a token, and the time in which the link is busy."""
    predicted = planned.plan.predicted
    known = [name for name in TIMED if predicted[name].seconds_per_token is not None]
    if not known:
        return None

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        for row, name in enumerate(known):
            seconds, stall = predicted[name].seconds_per_token or 0.0, predicted[name].stall_seconds_per_token or 0.0
            compute, link = 1e3 * (seconds - stall), 1e3 * (planned.transfer_seconds(name) or 0.0)
            axes.barh(row - 0.16, compute, 0.34, color=COMPUTE_COLOUR, label=None if row else "compute")
            axes.barh(row - 0.16, 1e3 * stall, 0.34, left=compute, color=STALL_COLOUR, label=None if row else "stall")
            axes.barh(row + 0.16, link, 0.2, color=LINK_COLOUR, label=None if row else "transfers: the link is busy")
            text = f"{1e3 * seconds:.2f} ms, {1e3 * stall:.2f} of them stall"
            _beside(axes, text, 1e3 * seconds, row - 0.16, INK)
            _beside(axes, f"{link:.2f} ms of transfers", link, row + 0.16, MUTED)
        axes.set_yticks(range(len(known)), [COLUMN_NAMES[name] for name in known], color=INK)
        axes.set_ylim(len(known) - 0.5, -1.0)
        axes.set_xlim(0, 1.5 * axes.get_xlim()[1])
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("ms per token")
        axes.legend(loc="upper left", frameon=False, ncols=3)

    return draw(_time_finding(planned), 9.6, 1.5 + 0.62 * len(known), paint)


def _beside(axes: Axes, text: str, x: float, y: float, colour: str) -> None:
    axes.annotate(text, (x, y), (5, 0), textcoords="offset points", va="center", color=colour, fontsize=9.5)


def _time_finding(planned: Planned) -> str:
    mine, uniform = (planned.plan.predicted[name].seconds_per_token for name in (IN_SAMPLE, UNIFORM))
    link = planned.transfer_seconds(IN_SAMPLE)
    if mine is None or uniform is None or link is None or not uniform:
        return "Where the time of a token goes"
    stall = planned.plan.predicted[IN_SAMPLE].stall_seconds_per_token or 0.0
    hidden = f"; {percent(1 - stall / link, 0)} of its transfers hide behind compute" if link else ""
    return f"A token takes {1e3 * mine:.2f} ms with this plan, {1e3 * uniform:.2f} with uniform slots{hidden}"
