"""`bel-profile simulate`: a table on a terminal, or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bel.formats.console import SETTINGS, json_option, print_json, say
from bel.formats.errors import UsageError, printable_line
from bel.formats.units import MIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from bel.formats.profile import Profile
    from bel.formats.trace_calls import Trace
    from bel.formats.trace_header import TraceHeader, TraceLayer
    from bel.profiler.outcomes import Setup
    from bel.profiler.simulate import Row
    from bel.profiler.slot_budgets import Budget, SharedBudget
    from bel.profiler.work import Work

NAME = "bel-profile"
DEFAULT_FRACTIONS = "0.25,0.5,0.75"
DEFAULT_POLICIES = "static-oracle,lru,belady"
HOST_TIERS = ("exclusive", "inclusive", "copy-on-read")
CLOCKS = ("arrival", "demand", "blocking")
_PATH = click.Path(path_type=Path)


@dataclass(frozen=True, slots=True)
class Host:
    """The options of the RAM behind VRAM, as given."""

    bytes_text: str | None
    tier: str | None
    on_miss: str | None


@click.command("simulate", context_settings=SETTINGS)
@click.argument("paths", nargs=-1, required=True, type=_PATH, metavar="TRACE...")
@click.option("--policy", "policy_text", default=DEFAULT_POLICIES, show_default=True, help="Policies, with commas between.")
@click.option("--slots", "slots_text", metavar="N,N", help="Slots in each layer.")
@click.option("--fraction", "fraction_text", metavar="F,F", help=f"Share of the experts.  Default: {DEFAULT_FRACTIONS}.")
@click.option("--bytes", "bytes_text", metavar="SIZE,SIZE", help="Bytes of the cache (8G); layers share them equally.")
@click.option(
    "--scope",
    type=click.Choice(["layer", "global"]),
    default="layer",
    show_default=True,
    help="A cache in each layer, or one in bytes for all layers.",
)
@click.option(
    "--phase",
    type=click.Choice(["decode", "prompt", "all"]),
    default="decode",
    show_default=True,
    help="The calls that count; the cache sees all of them.",
)
@click.option(
    "--held-out",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Count the last so large share of the work alone (0.5); the set `static` is made of the part before.",
)
@click.option(
    "--oversized",
    type=click.Choice(["cut", "keep"]),
    default="cut",
    show_default=True,
    help="A call larger than the cache is cut after it, or stays whole until the next call was looked up.",
)
@click.option("--host-bytes", metavar="SIZE", help="RAM for experts behind the cache, which is then in VRAM.")
@click.option("--host-tier", type=click.Choice(HOST_TIERS), help="What RAM holds.  Default: exclusive.")
@click.option("--on-miss", type=click.Choice(["load", "cpu"]), help="Load a missed expert, or compute it on the CPU.")
@click.option("--costs", "costs_path", type=_PATH, help="Price the misses with what `bel-profile bandwidth` measured.")
@click.option("--clock", "clock_kind", type=click.Choice(CLOCKS), help="When fetches start, as in plan.  Default: demand.")
@json_option
def simulate_command(
    paths: tuple[Path, ...],
    policy_text: str,
    slots_text: str | None,
    fraction_text: str | None,
    bytes_text: str | None,
    scope: str,
    phase: str,
    held_out: float | None,
    oversized: str,
    host_bytes: str | None,
    host_tier: str | None,
    on_miss: str | None,
    costs_path: Path | None,
    clock_kind: str | None,
    as_json: bool,
) -> None:
    """Say exactly what a cache of experts would have hit on recorded work, by policy and size.

    Each trace is a run that starts with an empty cache; hits of several are added.  Fixed sets are loaded beforehand.

    \b
    Policies:
      static-oracle           the best fixed set in hindsight
      static:PROFILE.json     the experts that a profile uses most in the phase
      static                  those of the part before the held-out one
      lru, slru, arc, s3fifo, random
      lfu-forget, lfu-ghost   counts of uses, dropped or kept when an expert leaves
      lfu-decay:0.98, lfuda   old uses count less, or what entered long ago does
      repick:500              a set chosen again every 500 tokens
      belady                  knows the future: the most hits of any cache that starts empty

    \b
    Examples:
      bel-profile simulate code.trace
      bel-profile simulate code.trace --policy lru,lfu-decay:0.98,belady,static:chat.json --slots 8,16,32
      bel-profile simulate code-1.trace code-2.trace --scope global --bytes 4G,8G --json
      bel-profile simulate code.trace --policy static,lru --held-out 0.5
      bel-profile simulate code.trace --policy lru --bytes 4G --host-bytes 8G
    """
    from bel.profiler.simulate import knees_json, parse_policies, rows_json, simulate
    from bel.profiler.work import count_work

    sizes = {"--slots": slots_text, "--fraction": fraction_text, "--bytes": bytes_text}
    given = {option: text for option, text in sizes.items() if text is not None}
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other", hint="Give one of them")
    policies = parse_policies(policy_text)
    host = Host(host_bytes, host_tier, on_miss)
    _check_options(host, costs_path, clock_kind, phase)
    traces, layers, profiles = _read(paths, [p.profile for p in policies if p.profile is not None])
    budgets = _budgets(given or {"--fraction": DEFAULT_FRACTIONS}, layers, scope)
    setup = _setup(traces, layers, oversized, host, costs_path, clock_kind)
    work = count_work(traces, layers, phase, held_out=held_out or 0.0)
    _say_notes(paths, work, [p.name for p in policies], budgets)
    rows = simulate(work, policies, budgets, profiles, setup)
    if as_json:
        print_json({"rows": rows_json(rows), "knees": knees_json(rows)})
    else:
        _print_rows(rows, work, setup, len(budgets))


def _check_options(host: Host, costs_path: Path | None, clock_kind: str | None, phase: str) -> None:
    if host.bytes_text is None and (host.tier or host.on_miss):
        raise UsageError(f"{'--host-tier' if host.tier else '--on-miss'} needs a RAM tier", hint="Give --host-bytes too")
    if clock_kind is not None and costs_path is None:
        raise UsageError("--clock prices misses with measured costs", hint="Give --costs too")
    if costs_path is not None and host.bytes_text is not None:
        raise UsageError("--costs with --host-bytes is not built yet: three tiers are not priced", hint="Give one of them")
    if costs_path is not None and phase != "decode":
        raise UsageError("--costs prices decode tokens, whose layer times are known", hint="Use --phase decode")


def _setup(
    traces: Sequence[Trace],
    layers: Sequence[TraceLayer],
    oversized: str,
    host: Host,
    costs_path: Path | None,
    clock_kind: str | None,
) -> Setup:
    from bel.profiler.outcomes import Setup, trace_clock

    clock = None
    if costs_path is not None:
        from bel.formats.costs import load_costs
        from bel.profiler.output import check_inputs

        check_inputs([costs_path])
        clock = trace_clock(load_costs(costs_path), traces, layers, clock_kind or "demand")
    return Setup(
        keep_whole=oversized == "keep",
        host_bytes=None if host.bytes_text is None else parse_bytes(host.bytes_text),
        host_tier=host.tier or HOST_TIERS[0],
        on_miss=host.on_miss or "load",
        clock=clock,
    )


def _say_notes(
    paths: Sequence[Path], work: Work, policies: Sequence[str], budgets: Sequence[Budget] | Sequence[SharedBudget]
) -> None:
    from bel.profiler.slot_budgets import SharedBudget, has_sizes, token_cycle

    for budget in budgets:
        if budget.note:
            say(NAME, budget.note)
    cycle = token_cycle(work.layers)
    shown = format_bytes(cycle) if has_sizes(work.layers) else f"{cycle} experts"
    if "lru" in policies and any(isinstance(b, SharedBudget) and b.capacity < cycle for b in budgets):
        say(NAME, f"one token uses {shown}: a global LRU below that hits nothing, or next to nothing")
    if not work.tokens:
        what = "" if work.phase == "all" else work.phase + " "
        say(NAME, f"there are no {what}tokens in {', '.join(map(str, paths))}")


def _read(
    paths: Sequence[Path], profile_names: Sequence[str]
) -> tuple[list[Trace], tuple[TraceLayer, ...], dict[str, Profile]]:
    """Traces, the layers of their model, and profiles by name; all of one model."""
    from bel.formats.profile_json import load_profile
    from bel.formats.trace_calls import read_trace
    from bel.profiler.output import check_inputs
    from bel.profiler.same_model import Identity, check_all_same, merged_layers

    check_inputs(paths)
    check_inputs([Path(name) for name in profile_names])
    traces = [read_trace(path) for path in paths]
    for path, trace in zip(paths, traces, strict=True):
        for note in trace.notes:
            say(NAME, f"{path}: {note}")
    profiles = {name: load_profile(Path(name)) for name in profile_names}
    sources: list[tuple[str, TraceHeader | Profile]] = [(str(p), t.header) for p, t in zip(paths, traces, strict=True)]
    sources += profiles.items()
    identities = [Identity(path, x.model_name, x.arch, x.fingerprint, x.layers) for path, x in sources]
    check_all_same(identities)
    return traces, merged_layers(identities), profiles


def _budgets(given: dict[str, str], layers: Sequence[TraceLayer], scope: str) -> tuple[Budget, ...] | tuple[SharedBudget, ...]:
    from bel.profiler.slot_budgets import read_budgets, read_shared_budgets

    ((option, text),) = given.items()
    return read_budgets(option, text, layers) if scope == "layer" else read_shared_budgets(option, text, layers)


def _print_rows(rows: Sequence[Row], work: Work, setup: Setup, budgets: int) -> None:
    """Numbers are never wrapped or cut."""
    from bel.profiler.simulate import knees

    what = "prompt and decode" if work.phase == "all" else work.phase
    runs = len(work.runs)
    title = f"{rows[0].accesses} accesses of {work.tokens} {what} tokens in {runs} trace{'s' if runs > 1 else ''}"
    click.secho(title + (f", held out between {work.held_out}" if work.held_out else ""), bold=True)
    found = knees(rows) if budgets > 1 else {}
    columns = [_cells(row, setup, is_knee=found.get(row.policy) is row) for row in rows]
    cells = [tuple(columns[0]), *(tuple(c.values()) for c in columns)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for number, cell in enumerate(cells):
        shown = [cell[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(cell[1:], widths[1:], strict=True))]
        click.secho("  ".join(shown).rstrip(), bold=number == 0)
    for line in _legend(rows, setup, has_knees=bool(found)):
        click.echo(line)


def _legend(rows: Sequence[Row], setup: Setup, *, has_knees: bool) -> list[str]:
    lines = ["regret: 0 is Belady, 1 a random fixed set. Fixed sets are loaded beforehand; all others start empty."]
    if has_knees:
        lines.append("knee: the policy's smallest cache here whose hit rate is within 10 % of its best one.")
    if any(row.found.uploads for row in rows):
        lines.append("repick: what it uploads is in the MiB/token, and not in the misses.")
    if setup.host_bytes is not None:
        lines.append("NVMe, to VRAM, to RAM: MiB per token that are read, loaded into VRAM, and demoted out of it.")
    if setup.clock is not None:
        lines.append(f"ms/token: compute and stall by the clock {setup.clock.kind}, all misses read from NVMe.")
    return lines


def _cells(row: Row, setup: Setup, *, is_knee: bool) -> dict[str, str]:
    from bel.profiler.verdicts import DASH, percent

    def number(value: float | None, scale: float = 1) -> str:
        return DASH if value is None else f"{value / scale:.2f}"

    slots = sorted(set((row.slots_by_layer or {}).values()))
    found = row.found
    cells = {
        "policy": printable_line(row.policy),
        "slots a layer": DASH if not slots else str(slots[0]) if len(slots) == 1 else f"{slots[0]} to {slots[-1]}",
        "all slots": DASH if row.slots_bytes is None else format_bytes(row.slots_bytes),
        "hit rate": percent(row.hit_rate),
        "misses/token": number(row.per_token(row.misses)),
    }
    if setup.host_bytes is None:
        cells["MiB/token"] = number(row.per_token(found.nvme_bytes), MIB)
    else:
        links = {"NVMe": found.nvme_bytes, "to VRAM": found.h2d_bytes, "to RAM": found.d2h_bytes}
        cells |= {name: number(row.per_token(amount), MIB) for name, amount in links.items()}
    if setup.clock is not None:
        cells["ms/token"] = number(row.per_token(found.seconds), 1e-3)
    return {**cells, "regret": number(row.regret), "": "knee" if is_knee else ""}
