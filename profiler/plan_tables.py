"""A plan in words and tables, for people."""

from __future__ import annotations

import math

from bel.formats.plan import BELADY, COLUMNS, HELD_OUT, IN_SAMPLE, RANDOM, STALL, UNIFORM, Plan, Prediction
from bel.formats.units import MIB, format_bytes
from bel.profiler.make_plan import Planned
from bel.profiler.table import Table
from bel.profiler.verdicts import DASH, percent

GROUPS = 8  # rows of layers
COLUMN_NAMES = {IN_SAMPLE: "this plan", HELD_OUT: "held out", UNIFORM: "uniform", RANDOM: "random", BELADY: "Belady"}
_NOTICEABLE = 0.01  # a smaller difference is none that anybody would see


def plan_title(plan: Plan) -> str:
    """What the plan is, in a line."""
    goal = "seconds of stall" if plan.objective == STALL else "misses"
    slots, total = sum(x.slots for x in plan.layers), sum(x.n_expert for x in plan.layers)
    return f"{slots} of {total} experts in slots, {format_bytes(plan.slots_bytes)}, made for the fewest {goal}"


def layer_rows(plan: Plan) -> list[tuple[str, str]]:
    """The slots of at most GROUPS runs of layers, each with its share of the experts and its bytes."""
    size = math.ceil(len(plan.layers) / GROUPS)
    rows = []
    for at in range(0, len(plan.layers), size):
        group = plan.layers[at : at + size]
        numbers = [str(group[0].layer)] + ([str(group[-1].layer)] if len(group) > 1 else [])
        slots = [x.slots for x in group]
        span = str(min(slots)) if min(slots) == max(slots) else f"{min(slots)} to {max(slots)}"
        share = sum(slots) / sum(x.n_expert for x in group)
        size_bytes = format_bytes(sum(x.slots * x.slot_bytes for x in group))
        each = "slots" if len(group) == 1 else "slots each"
        label = f"layer{'s' if len(group) > 1 else ''} {' to '.join(numbers)}"
        rows.append((label, f"{span} {each}, {percent(share)} of the experts, {size_bytes}"))
    return rows


def prediction_table(plan: Plan) -> Table:
    """The figures per decode token of the plan and of what it is compared with."""
    head = ("per token", "hit rate", "misses", "MiB read", "ms", "ms stalled")
    rows = tuple((COLUMN_NAMES[name], *_cells(plan.predicted[name])) for name in COLUMNS)
    return Table("What a token costs with this plan, and with other slots of the same bytes", head, rows)


def layer_table(planned: Planned) -> Table:
    """The slots of each layer."""
    rows = tuple(
        (str(x.layer), str(x.n_expert), str(x.slots), str(uniform), format_bytes(x.slots * x.slot_bytes))
        for x, uniform in zip(planned.plan.layers, planned.uniform, strict=True)
    )
    return Table("Slots of each layer", ("layer", "experts", "slots", "uniform slots", "bytes of the slots"), rows)


def _cells(row: Prediction) -> tuple[str, ...]:
    def number(value: float | None, unit: float = 1) -> str:
        return DASH if value is None else f"{value / unit:.2f}"

    return (
        percent(row.hit_rate),
        number(row.misses_per_token),
        number(row.bytes_per_token, MIB),
        number(row.seconds_per_token, 1e-3),
        number(row.stall_seconds_per_token, 1e-3),
    )


def verdicts(planned: Planned) -> list[str]:
    """What the plan is worth against uniform slots of the same bytes, in sentences."""
    plan = planned.plan
    lines = [_against_uniform(planned), *_held_out(planned), *_blocking(planned), *_regret(plan)]
    lines.append(
        "Held out: planned from one half of the work, counted on the other. Uniform: as many slots in each layer, of the same "
        "bytes. Random: any experts in uniform slots. Belady: the fewest misses of any cache with this plan's slots."
    )
    return lines


def _figure(plan: Plan, column: str) -> float | None:
    row = plan.predicted[column]
    return row.seconds_per_token if plan.objective == STALL else row.misses_per_token


def _saved(plan: Plan, column: str) -> float | None:
    """The share of uniform's seconds or misses that a column saves."""
    mine, uniform = _figure(plan, column), _figure(plan, UNIFORM)
    return None if mine is None or uniform is None else 1 - mine / uniform if uniform else 0.0


def _against_uniform(planned: Planned) -> str:
    plan = planned.plan
    what = "of the time" if plan.objective == STALL else "of the misses"
    saved = _saved(plan, IN_SAMPLE)
    if planned.is_uniform or saved is None or not saved:
        return "No other way to share these bytes out does better on this work: the plan has uniform slots."
    if saved < _NOTICEABLE:
        return f"The plan saves {percent(saved)} {what} of uniform slots: next to nothing, uniform slots do as well."
    return f"The plan saves {percent(saved)} {what} that uniform slots of the same bytes take."


def _held_out(planned: Planned) -> list[str]:
    plan = planned.plan
    saved = _saved(plan, HELD_OUT)
    if planned.is_uniform:
        return []
    if saved is None:
        return ["Nothing could be held out, so that this is what the plan does on the work it was made from."]
    by = f"split by {plan.split}"
    if abs(saved) < _NOTICEABLE / 10:
        return [f"On work that it was not made from ({by}) it does as uniform slots do."]
    if saved < 0:
        return [
            f"On work that it was not made from ({by}) it loses {percent(-saved)}: take uniform slots, or record more work."
        ]
    return [f"On work that it was not made from ({by}) it saves {percent(saved)}."]


def _blocking(planned: Planned) -> list[str]:
    """How the plan does where nothing is fetched ahead."""
    if planned.blocking is None or planned.plan.clock == "blocking" or planned.is_uniform:
        return []
    mine, uniform = (f"{seconds * 1e3:.2f}" for seconds in planned.blocking)
    return [f"Where nothing is fetched ahead (--clock blocking) a token takes {mine} ms with it, {uniform} with uniform slots."]


def _regret(plan: Plan) -> list[str]:
    if len(plan.workloads) < 2 or plan.worst_regret is None:
        return []
    worst = max(plan.workloads, key=lambda w: -1 if w.regret is None else w.regret)
    what = "time" if plan.objective == STALL else "misses"
    return [f"Sharing costs {worst.name} most: {percent(plan.worst_regret)} more {what} than a plan of its own."]
