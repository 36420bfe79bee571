"""`bel-profile simulate`: a table on a terminal, or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bel.formats.console import SETTINGS, F, json_option, print_json, say
from bel.formats.errors import UsageError, printable_line
from bel.formats.units import MIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from bel.formats.profile import Profile
    from bel.formats.trace_calls import Trace
    from bel.formats.trace_header import TraceHeader, TraceLayer
    from bel.profiler.simulate import Row, Work
    from bel.profiler.slot_budgets import Budget

NAME = "bel-profile"
DEFAULT_FRACTIONS = "0.25,0.5,0.75"
_SUPPORTED = "Supported: --policy, one of --slots, --fraction and --bytes, --scope layer, --phase and --json"
_PATH = click.Path(path_type=Path)


def _refuse(_context: click.Context, option: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise UsageError(f"{option.opts[0]} is not built yet", hint=_SUPPORTED)


def _planned_options(command: F) -> F:
    """Options that will come: hidden, and refused with a word of what there is."""
    for name in ("--host-bytes", "--host-tier", "--on-miss", "--held-out", "--costs"):
        command = click.option(name, hidden=True, expose_value=False, callback=_refuse)(command)
    return command


@click.command("simulate", context_settings=SETTINGS)
@click.argument("paths", nargs=-1, required=True, type=_PATH, metavar="TRACE...")
@click.option(
    "--policy",
    "policy_text",
    default="static-oracle,lru,belady",
    show_default=True,
    help="Of lru, belady, static-oracle and static:PROFILE.json, with commas between.",
)
@click.option("--slots", "slots_text", metavar="N,N", help="Slots in each layer.")
@click.option(
    "--fraction", "fraction_text", metavar="F,F", help=f"Share of each layer's experts.  Default: {DEFAULT_FRACTIONS}."
)
@click.option("--bytes", "bytes_text", metavar="SIZE", help="Bytes of all slots (8G), shared equally between layers.")
@click.option(
    "--scope", type=click.Choice(["layer", "global"]), default="layer", show_default=True, help="Global is not built yet."
)
@click.option(
    "--phase",
    type=click.Choice(["decode", "prompt", "all"]),
    default="decode",
    show_default=True,
    help="The calls that count; the cache sees all of them.",
)
@_planned_options
@json_option
def simulate_command(
    paths: tuple[Path, ...],
    policy_text: str,
    slots_text: str | None,
    fraction_text: str | None,
    bytes_text: str | None,
    scope: str,
    phase: str,
    as_json: bool,
) -> None:
    """Say exactly what a cache of experts in each layer would have hit on recorded work, by policy and size.

    Each trace is a run that starts with an empty cache; hits of several are added.  Policies: lru; belady, the most hits of
    any cache that starts empty; static-oracle, the best fixed set in hindsight; static:PROFILE.json, the fixed set of the
    experts that a profile uses most in the phase.  Fixed sets are loaded beforehand.

    \b
    Examples:
      bel-profile simulate code.trace
      bel-profile simulate code.trace --policy lru,belady,static:chat.json --slots 8,16,32
      bel-profile simulate code-1.trace code-2.trace --bytes 8G --json
    """
    from bel.profiler.simulate import count_work, parse_policies, rows_json, simulate

    if scope != "layer":
        raise UsageError(f"--scope {scope} is not built yet", hint=_SUPPORTED)
    sizes = {"--slots": slots_text, "--fraction": fraction_text, "--bytes": bytes_text}
    given = {option: text for option, text in sizes.items() if text is not None}
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other", hint="Give one of them")
    policies = parse_policies(policy_text)
    traces, layers, profiles = _read(paths, [p.profile for p in policies if p.profile is not None])
    budgets = _budgets(given or {"--fraction": DEFAULT_FRACTIONS}, layers)
    for budget in budgets:
        if budget.note:
            say(NAME, budget.note)
    work = count_work(traces, layers, phase)
    if not work.tokens:
        say(NAME, f"there are no {'' if phase == 'all' else phase + ' '}tokens in {', '.join(map(str, paths))}")
    rows = simulate(work, policies, budgets, profiles)
    if as_json:
        print_json({"rows": rows_json(rows)})
    else:
        _print_rows(rows, work, len(traces))


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


def _budgets(given: dict[str, str], layers: Sequence[TraceLayer]) -> tuple[Budget, ...]:
    from bel.profiler.slot_budgets import byte_budget, fraction_budgets, slot_budgets

    ((option, text),) = given.items()
    if option == "--bytes":
        return (byte_budget(parse_bytes(text), layers),)
    return (slot_budgets if option == "--slots" else fraction_budgets)(text, layers)


def _print_rows(rows: Sequence[Row], work: Work, runs: int) -> None:
    """Numbers are never wrapped or cut."""
    accesses = sum(c.accesses for c in work.counts)
    what = "prompt and decode" if work.phase == "all" else work.phase
    click.secho(f"{accesses} accesses of {work.tokens} {what} tokens in {runs} trace{'s' if runs > 1 else ''}", bold=True)
    head = ("policy", "slots a layer", "all slots", "hit rate", "misses/token", "MiB/token", "regret")
    cells = [head, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for number, line in enumerate(cells):
        shown = [line[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True))]
        click.secho("  ".join(shown), bold=number == 0)
    click.echo("regret: 0 is Belady, 1 a random fixed set. Sets are loaded beforehand; lru and belady start empty.")


def _cells(row: Row) -> tuple[str, ...]:
    from bel.profiler.verdicts import DASH, percent

    def number(value: float | None) -> str:
        return DASH if value is None else f"{value:.2f}"

    slots = sorted(set(row.slots_by_layer.values()))
    read = row.missed_bytes_per_token
    return (
        printable_line(row.policy),
        str(slots[0]) if len(slots) == 1 else f"{slots[0]} to {slots[-1]}",
        DASH if row.slots_bytes is None else format_bytes(row.slots_bytes),
        percent(row.hit_rate),
        number(row.misses_per_token),
        number(None if read is None else read / MIB),
        number(row.regret),
    )
