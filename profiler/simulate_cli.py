"""`bel-profile simulate`: a table on a terminal, or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bel.formats.console import SETTINGS, json_option, print_json, say
from bel.formats.errors import UsageError
from bel.formats.staging import replace_file
from bel.formats.units import format_bytes, parse_bytes
from bel.profiler.table_cli import print_grid, table_console

if TYPE_CHECKING:
    from bel.formats.profile import Profile
    from bel.formats.trace_calls import Trace
    from bel.formats.trace_header import TraceHeader, TraceLayer
    from bel.profiler.outcomes import Setup
    from bel.profiler.simulate import Simulated
    from bel.profiler.slot_budgets import Budget, SharedBudget
    from bel.profiler.tier_caches import Room
    from bel.profiler.work import Work

NAME = "bel-profile"
DEFAULT_FRACTIONS = "0.25,0.5,0.75"
PAGE_FRACTIONS = "0.125,0.25,0.375,0.5,0.625,0.75,0.875,1"  # enough points for curves
DEFAULT_POLICIES = "static-oracle,lru,belady"
INCLUSIVE = "inclusive"
HOST_TIERS = ("exclusive", INCLUSIVE, "copy-on-read")
CLOCKS = ("arrival", "demand", "blocking")
_PATH = click.Path(path_type=Path)


@dataclass(frozen=True, slots=True)
class Host:
    """The options of the RAM behind VRAM, as given."""

    bytes_text: str | None
    slots: int | None
    tier: str | None
    on_miss: str | None

    @property
    def is_there(self) -> bool:
        """Whether there is such a RAM."""
        return self.bytes_text is not None or self.slots is not None


@click.command("simulate", context_settings=SETTINGS)
@click.argument("paths", nargs=-1, required=True, type=_PATH, metavar="TRACE...")
@click.option("--policy", "policy_text", default=DEFAULT_POLICIES, show_default=True, help="Policies, with commas between.")
@click.option("--slots", "slots_text", metavar="N,N", help="Slots in each layer.")
@click.option(
    "--fraction",
    "fraction_text",
    metavar="F,F",
    help=f"Share of the experts.  Default: {DEFAULT_FRACTIONS}; with --html eighths.",
)
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
@click.option("--host-slots", type=click.IntRange(0), metavar="N", help="The same in slots of each layer.")
@click.option("--host-tier", type=click.Choice(HOST_TIERS), help="What RAM holds.  Default: exclusive.")
@click.option("--on-miss", type=click.Choice(["load", "cpu"]), help="Load a missed expert, or compute it on the CPU.")
@click.option("--costs", "costs_path", type=_PATH, help="Price the misses with what `bel-profile bandwidth` measured.")
@click.option(
    "--clock",
    "clock_kind",
    type=click.Choice(CLOCKS),
    help=f"When fetches start, as in plan.  Default: {CLOCKS[0]}.  bel-run waits for what a layer misses, but for a few "
    "guesses: blocking is the clock that predicts it.",
)
@click.option("--html", "page", type=_PATH, help="Also write one self-contained page with figures.")
@click.option("--force", is_flag=True, help="Replace an existing page.")
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
    host_slots: int | None,
    host_tier: str | None,
    on_miss: str | None,
    costs_path: Path | None,
    clock_kind: str | None,
    page: Path | None,
    force: bool,
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
      repick:500              a set chosen again every 500 tokens; misses pass it by, so that it may beat belady
      belady                  knows the future: the most hits of any cache that starts empty

    \b
    Examples:
      bel-profile simulate code.trace
      bel-profile simulate code.trace --policy lru,lfu-decay:0.98,belady,static:chat.json --slots 8,16,32
      bel-profile simulate code-1.trace code-2.trace --scope global --bytes 4G,8G --json
      bel-profile simulate code.trace --policy static,lru --held-out 0.5
      bel-profile simulate code.trace --policy lru --bytes 4G --host-bytes 8G
      bel-profile simulate code.trace --policy lru,lfu-decay:0.98,belady --html sim.html
    """
    from bel.profiler.outcomes import room_of
    from bel.profiler.simulate import Simulated, knees_json, parse_policies, rows_json, simulate
    from bel.profiler.slot_budgets import distinct
    from bel.profiler.tier_caches import check_inclusive
    from bel.profiler.work import count_work

    sizes = {"--slots": slots_text, "--fraction": fraction_text, "--bytes": bytes_text}
    given = {option: text for option, text in sizes.items() if text is not None}
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other", hint="Give one of them")
    policies = parse_policies(policy_text)
    host = Host(host_bytes, host_slots, host_tier, on_miss)
    _check_options(host, costs_path, clock_kind, phase, held_out)
    if page is not None:
        _check_page(
            page, [*paths, *(Path(p.profile) for p in policies if p.profile), *([costs_path] if costs_path else [])], force
        )
    traces, layers, profiles = _read(paths, [p.profile for p in policies if p.profile is not None])
    if bytes_text is not None:
        layers = _page_sized(layers)
    asked = _budgets(given or {"--fraction": DEFAULT_FRACTIONS if page is None else PAGE_FRACTIONS}, layers, scope)
    setup = _setup(traces, layers, oversized, host, costs_path, clock_kind)
    budgets = distinct(asked)
    if setup.host is not None and setup.host_tier == INCLUSIVE:
        for budget in budgets:
            check_inclusive(room_of(budget), setup.host, layers)
    work = count_work(traces, layers, phase, held_out=held_out or 0.0)
    _say_notes(paths, work, [p.name for p in policies], asked)
    result = Simulated(simulate(work, policies, budgets, profiles, setup), work, setup, traces[0].header.model_name)
    if page is not None:
        from bel.profiler.simulate_page import make_page

        replace_file(page, make_page(result).encode())
        say(NAME, f"wrote {page}")
    if as_json:
        print_json({"rows": rows_json(result.rows), "knees": knees_json(result.rows)})
    else:
        _print(result)


def _check_page(page: Path, inputs: Sequence[Path], force: bool) -> None:
    from bel.profiler.output import check_output
    from bel.profiler.page import need_plot

    check_output(page, inputs, force=force, replaces="")
    need_plot()


def _check_options(host: Host, costs_path: Path | None, clock_kind: str | None, phase: str, held_out: float | None) -> None:
    if held_out is not None and not 0 < held_out < 1:  # click takes nan for a number of any range
        raise UsageError("--held-out is not a number between 0 and 1", found=held_out, hint="A half is 0.5")
    if host.bytes_text is not None and host.slots is not None:
        raise UsageError("--host-bytes and --host-slots exclude each other", hint="Give one of them")
    if not host.is_there and (host.tier or host.on_miss):
        option = "--host-tier" if host.tier else "--on-miss"
        raise UsageError(f"{option} needs a RAM tier", hint="Give --host-bytes or --host-slots too")
    if clock_kind is not None and costs_path is None:
        raise UsageError("--clock prices misses with measured costs", hint="Give --costs too")
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

    setup = Setup(
        keep_whole=oversized == "keep",
        host=_room(host, layers),
        host_tier=host.tier or HOST_TIERS[0],
        on_miss=host.on_miss or "load",
    )
    if costs_path is not None:
        from bel.profiler.inputs import block_note, read_costs
        from bel.profiler.output import check_inputs

        check_inputs([costs_path])
        costs = read_costs(costs_path)
        clock = trace_clock(costs, traces, layers, clock_kind or CLOCKS[0], setup)
        if far := block_note(costs, [x.expert_bytes for x in layers if x.expert_bytes is not None]):
            say(NAME, far)
        return replace(setup, clock=clock)
    return setup


def _room(host: Host, layers: Sequence[TraceLayer]) -> Room | None:
    from bel.profiler.slot_budgets import host_slots
    from bel.profiler.tier_caches import Room

    if host.slots is not None:
        budget = host_slots(host.slots, layers)
        if budget.note:
            say(NAME, budget.note)
        return Room(slots=budget.slots)
    return None if host.bytes_text is None else Room(shared_bytes=parse_bytes(host.bytes_text))


def _say_notes(
    paths: Sequence[Path], work: Work, policies: Sequence[str], budgets: Sequence[Budget] | Sequence[SharedBudget]
) -> None:
    from bel.profiler.slot_budgets import SharedBudget, has_sizes, token_cycle

    for note in dict.fromkeys(budget.note for budget in budgets if budget.note):
        say(NAME, note)
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
    from bel.formats.trace_calls import read_trace
    from bel.profiler.inputs import read_profile
    from bel.profiler.output import check_inputs
    from bel.profiler.same_model import Identity, check_all_same, merged_layers

    check_inputs(paths)
    check_inputs([Path(name) for name in profile_names])
    traces = [read_trace(path) for path in paths]
    for path, trace in zip(paths, traces, strict=True):
        for note in trace.notes:
            say(NAME, f"{path}: {note}")
    profiles = {name: read_profile(Path(name)) for name in profile_names}
    sources: list[tuple[str, TraceHeader | Profile]] = [(str(p), t.header) for p, t in zip(paths, traces, strict=True)]
    sources += profiles.items()
    identities = [Identity(path, x.model_name, x.arch, x.fingerprint, x.layers) for path, x in sources]
    check_all_same(identities)
    return traces, merged_layers(identities), profiles


def _budgets(given: dict[str, str], layers: Sequence[TraceLayer], scope: str) -> tuple[Budget, ...] | tuple[SharedBudget, ...]:
    from bel.profiler.slot_budgets import read_budgets, read_shared_budgets

    ((option, text),) = given.items()
    return read_budgets(option, text, layers) if scope == "layer" else read_shared_budgets(option, text, layers)


def _page_sized(layers: tuple[TraceLayer, ...]) -> tuple[TraceLayer, ...]:
    from bel.profiler.inputs import page_sized

    sized = page_sized(layers)
    if sized != layers:
        say(
            NAME,
            "--bytes: an expert takes its bytes rounded up to 4096; in a bundle, which only `plan --model` reads, maybe more",
        )
    return sized


def _print(result: Simulated) -> None:
    from rich.text import Text

    from bel.profiler.simulate_tables import legend, row_table

    console = table_console()
    table = row_table(result)
    console.print(Text(table.title, style="bold"), soft_wrap=True)
    print_grid(console, table)
    for line in legend(result):
        console.print(Text(line, style="dim"), soft_wrap=True)
