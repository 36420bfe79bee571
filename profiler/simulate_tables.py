"""What a simulation says, as a table and sentences for people.  Pure."""

from __future__ import annotations

from bel.formats.errors import printable_line
from bel.formats.units import MIB, format_bytes
from bel.profiler.simulate import Row, Simulated, knees
from bel.profiler.table import Table
from bel.profiler.tier_caches import CPU
from bel.profiler.verdicts import DASH, percent

Cells = dict[str, str]


def row_table(result: Simulated) -> Table:
    """A row for each policy and budget."""
    found = shown_knees(result)
    marks = ["knee" if found.get(row.policy) is row else "" for row in result.rows]
    cells = [_cells(row, result) | ({"": mark} if found else {}) for row, mark in zip(result.rows, marks, strict=True)]
    return Table(_title(result), tuple(cells[0]), tuple(tuple(c.values()) for c in cells))


def shown_knees(result: Simulated) -> dict[str, Row]:
    """The knee of each policy that has one."""
    return knees(result.rows)


def _title(result: Simulated) -> str:
    work = result.work
    what = "prompt and decode" if work.phase == "all" else work.phase
    runs = len(work.runs)
    title = f"{result.rows[0].accesses} accesses of {work.tokens} {what} tokens in {runs} trace{'s' if runs > 1 else ''}"
    return title + (f", the last {percent(work.held_out_share)}, held out between {work.held_out}" if work.held_out else "")


def _cells(row: Row, result: Simulated) -> Cells:
    slots = sorted(set((row.slots_by_layer or {}).values()))
    return {
        "policy": printable_line(row.policy),
        "slots a layer": DASH if not slots else str(slots[0]) if len(slots) == 1 else f"{slots[0]} to {slots[-1]}",
        "all slots": DASH if row.slots_bytes is None else format_bytes(row.slots_bytes),
        "hit rate": percent(row.hit_rate),
        **_misses(row, result),
        **({} if result.setup.clock is None else {"ms/token": _number(row.per_token(row.found.seconds), 1e-3)}),
        "regret": _number(row.regret),
    }


def _misses(row: Row, result: Simulated) -> Cells:
    found = row.found
    cells = {"misses/token": _number(row.per_token(row.misses))}
    if result.setup.host is None:
        return {**cells, "MiB/token": _number(row.per_token(found.nvme_bytes), MIB)}
    cells["in RAM"] = percent(found.host_hits / row.accesses if row.accesses and found.host_hits is not None else None)
    if result.setup.on_miss == CPU:
        cells["CPU/token"] = _number(row.per_token(found.on_cpu))
    links = {"MiB from NVMe": found.nvme_bytes, "MiB to VRAM": found.h2d_bytes, "MiB to RAM": found.d2h_bytes}
    return cells | {name: _number(row.per_token(amount), MIB) for name, amount in links.items()}


def _number(value: float | None, unit: float = 1) -> str:
    return DASH if value is None else f"{value / unit:.2f}"


def legend(result: Simulated) -> list[str]:
    """What the columns mean, as far as they are there."""
    setup = result.setup
    lines = ["regret: 0 is Belady, 1 a random fixed set. Fixed sets are loaded beforehand; all others start empty."]
    if shown_knees(result):
        lines.append("knee: the policy's smallest cache here whose hit rate is within 10 % of its best one.")
    if any(row.found.uploads for row in result.rows):
        lines.append("repick: what it uploads is in the MiB/token, and not in the misses.")
    if setup.host is not None:
        lines.append("in RAM: of all accesses, the share that VRAM missed and RAM had; what is in neither rate came from NVMe.")
        lines.append("MiB per token: read from NVMe, loaded to VRAM, and demoted out of it to RAM.")
    if setup.clock is not None:
        lines.append(f"ms/token: compute and stall by the clock {setup.clock.kind}, {_source(result)}.")
    return lines


def _source(result: Simulated) -> str:
    if result.setup.host is None:
        return "all misses read from NVMe"
    on_cpu = "; what the CPU computes runs beside the layer" if result.setup.on_miss == CPU else ""
    return f"one link for reads from NVMe and loads from RAM; demotions take no time{on_cpu}"
