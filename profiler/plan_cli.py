"""`bel-profile plan`: slots for each layer, as a table on a terminal or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bel.formats.console import SETTINGS, json_option, print_json, print_table, say
from bel.formats.errors import UsageError
from bel.formats.plan import MISSES, OBJECTIVES, STALL
from bel.formats.staging import replace_file
from bel.formats.units import parse_bytes
from bel.profiler.kv_cache import CACHE_TYPES
from bel.profiler.output import check_inputs, check_output, is_same_output
from bel.profiler.page import need_plot
from bel.profiler.table_cli import print_grid, table_console

if TYPE_CHECKING:
    from bel.formats.costs import Costs
    from bel.profiler.clock import Clock
    from bel.profiler.footprint import Footprint
    from bel.profiler.make_plan import Planned
    from bel.profiler.plan_inputs import PlanInput

NAME = "bel-profile"
CLOCKS = ("arrival", "demand", "blocking")
_PATH = click.Path(path_type=Path)


@dataclass(frozen=True, slots=True)
class _Budget:
    """Bytes for slots, and the link that misses come over."""

    slots_bytes: int
    link: str
    notes: tuple[str, ...]


@click.command("plan", context_settings=SETTINGS)
@click.argument("inputs", nargs=-1, required=True, type=_PATH, metavar="PROFILE | TRACE...")
@click.option("--model", type=_PATH, help="The GGUF or bundle: what a slot takes, what else needs memory, and which model.")
@click.option("--vram", metavar="SIZE", help="Memory of the GPU (12G): slots get what the rest of the model leaves.")
@click.option("--ram", metavar="SIZE", help="Memory of the machine (16G).  Without --vram slots are in RAM.")
@click.option("--slots-bytes", "slots_text", metavar="SIZE", help="Bytes of all slots (8G).")
@click.option(
    "--context", type=click.IntRange(1), help="Context in tokens.  Default: 8192, or what the model was trained for if less."
)
@click.option(
    "--kv",
    type=click.Choice(CACHE_TYPES, case_sensitive=False),
    default="f16",
    show_default=True,
    help="Type of the cache of keys and values.",
)
@click.option(
    "--objective", type=click.Choice(OBJECTIVES), help="What to make smallest.  Default: stall, where times are known."
)
@click.option("--costs", "costs_path", type=_PATH, help="What `bel-profile bandwidth` measured on this machine.")
@click.option(
    "--clock",
    "clock_kind",
    type=click.Choice(CLOCKS),
    default=CLOCKS[0],
    show_default=True,
    help="When fetches start: all at the start of a token (arrival), when a layer has chosen, beside its own compute "
    "(demand), or before its compute (blocking).  bel-run waits for what a layer misses, but for a few guesses: "
    "blocking is the clock that predicts it.",
)
@click.option("-o", "output", type=_PATH, help="The plan to write.")
@click.option("--html", "page", type=_PATH, help="Also write one self-contained page with figures.")
@click.option("--force", is_flag=True, help="Replace an existing page, or an existing output that is no plan.")
@json_option
def plan_command(
    inputs: tuple[Path, ...],
    model: Path | None,
    vram: str | None,
    ram: str | None,
    slots_text: str | None,
    context: int | None,
    kv: str,
    objective: str | None,
    costs_path: Path | None,
    clock_kind: str,
    output: Path | None,
    page: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Share memory for experts out between the layers of a model, by what recorded work gains from it.

    The profile may be a merged one: its workloads count by their weights.  Misses are those of LRU caches.  Stall needs
    measured times: of layers (`record --timing`), and of the disk (`bandwidth`).

    \b
    Examples:
      bel-profile plan merged.json --model model.bel --ram 16G --costs costs.json -o plan.json
      bel-profile plan code.json --model model.gguf --vram 12G --ram 32G --context 16384 --kv q8_0
      bel-profile plan code.trace --slots-bytes 8G --costs costs.json --clock blocking --html plan.html
      bel-profile plan code.trace chat.trace --slots-bytes 8G --objective misses --json
    """
    from bel.profiler.inputs import block_note
    from bel.profiler.make_plan import make_plan
    from bel.profiler.plan_inputs import known_sizes, read_plan_input, with_model, without_model

    if costs_path is None and _is_given("clock_kind"):
        raise UsageError("--clock prices misses with measured costs", hint="Give --costs too")
    extra = [p for p in (costs_path, model) if p is not None]
    check_inputs(inputs, files=True)
    check_inputs(extra)
    if output is not None:
        _check_output(output, [*inputs, *extra], force=force)
    if page is not None:
        _check_page(page, [*inputs, *extra], output, force=force)
    sizes = {"vram": vram, "ram": ram, "slots_bytes": slots_text}
    asked = {name: parse_bytes(text) for name, text in sizes.items() if text is not None}
    costs = _load_costs(costs_path)
    given = read_plan_input(inputs)
    footprint = None
    if model is not None:
        given, footprint = with_model(given, model)
    else:
        given = without_model(given)
    budget = _budget(asked, footprint, context, kv.lower())
    far = "" if costs is None else block_note(costs, known_sizes(given))
    for note in [*given.notes, *budget.notes, *([far] if far else [])]:
        say(NAME, note)
    clock = _clock(given, costs, objective, clock_kind, budget.link)
    goal = MISSES if clock is None or objective == MISSES else STALL
    planned = make_plan(given, budget.slots_bytes, goal, clock, _assumptions(given, clock, budget.link))
    if planned.note:
        say(NAME, planned.note)
    _write(planned, output, page)
    _show(planned, as_json=as_json)


def _write(planned: Planned, output: Path | None, page: Path | None) -> None:
    from bel.formats.plan_json import encode_plan

    if output is not None:
        replace_file(output, encode_plan(planned.plan), is_last=page is None)
        say(NAME, f"wrote {output}")
    if page is not None:
        from bel.profiler.plan_page import make_page

        replace_file(page, make_page(planned).encode())
        say(NAME, f"wrote {page}")


def _check_output(output: Path, inputs: Sequence[Path], *, force: bool) -> None:
    from bel.formats.plan_json import FORMAT

    check_output(output, inputs, force=force, replaces=FORMAT)


def _check_page(page: Path, inputs: Sequence[Path], output: Path | None, *, force: bool) -> None:
    if output is not None and is_same_output(page, output):
        raise UsageError("the plan and the page have one name", path=str(page), hint="Use --html NAME.html")
    check_output(page, inputs, force=force, replaces="")
    need_plot()


def _load_costs(path: Path | None) -> Costs | None:
    from bel.profiler.inputs import read_costs

    return None if path is None else read_costs(path)


def _is_given(name: str) -> bool:
    """Whether an option stands on the command line."""
    return click.get_current_context().get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def _budget(asked: dict[str, int], footprint: Footprint | None, context: int | None, kv: str) -> _Budget:
    """What slots may take: what is asked for, and no more than what fits where memory is given."""
    from bel.profiler.fit import Question, default_context, solve
    from bel.profiler.plan_inputs import H2D, NVME

    vram, ram, slots_bytes = asked.get("vram", 0), asked.get("ram"), asked.get("slots_bytes")
    if not vram and ram is None:
        if slots_bytes is None:
            raise UsageError("it is not said how much memory there is for slots", hint="Give --vram, --ram or --slots-bytes")
        idle = [option for option, name in (("--context", "context"), ("--kv", "kv")) if _is_given(name)]
        what = f"{' and '.join(idle)} {'have' if len(idle) > 1 else 'has'} no effect: --slots-bytes alone says what slots take"
        return _Budget(slots_bytes, NVME, (what,) if idle else ())
    if footprint is None:
        raise UsageError("--vram and --ram need --model: what else of the model needs memory", hint="Or give --slots-bytes")
    context = context or default_context(footprint)
    fit = solve(footprint, Question(vram, vram if ram is None else ram, context, kv, slots_bytes=slots_bytes))
    if not fit.fits:
        raise UsageError(
            f"the model does not fit: {max(fit.room_bytes, 0)} bytes are left for slots, and top-k slots in each layer take "
            f"{fit.floor_bytes}",
            hint="`bel-profile fit` with the same options says what to change",
        )
    is_behind_link = fit.is_gpu and ram is not None and not fit.on_disk_bytes
    return _Budget(fit.room_bytes, H2D if is_behind_link else NVME, fit.notes)


def _clock(given: PlanInput, costs: Costs | None, objective: str | None, kind: str, link: str) -> Clock | None:
    """The clock; None where times are missing and nobody asked for the objective stall."""
    from bel.profiler.plan_inputs import plan_clock

    if objective == MISSES and costs is None:
        return None
    try:
        return plan_clock(given, costs, kind, link)
    except UsageError as error:
        if objective == STALL:
            raise
        say(NAME, f"{'there will be no times' if objective == MISSES else 'planning for misses'}: {error}")
        return None


def _assumptions(given: PlanInput, clock: Clock | None, link: str) -> tuple[str, ...]:
    from bel.profiler.decode_steps import MAX_STEPS

    notes = ["misses are those of an LRU cache in each layer that decodes after the prompt"]
    if given.by_counts:
        notes = [
            f"only counts are known of {', '.join(given.by_counts)}: misses are those of the experts used most, held as a "
            "fixed set, and nothing is held out"
        ]
    elif clock is not None:
        notes.append(f"times are for fetches from the {link}, one after the other, by the clock {clock.kind}")
        if any(w.whole.steps is not None and w.whole.steps.recorded > len(w.whole.steps.places) for w in given.works):
            notes.append(f"of each workload {MAX_STEPS} decode steps, evenly drawn, were timed")
        if not given.is_traced:
            notes.append(
                "a profile does not say which misses fall on one token: layers are taken as independent; plan from "
                "traces to know"
            )
    return tuple(notes)


def _show(planned: Planned, *, as_json: bool) -> None:
    from bel.formats.plan_json import plan_to_json
    from bel.profiler.plan_tables import layer_rows, plan_title, prediction_table, verdicts

    plan = planned.plan
    if as_json:
        print_json(plan_to_json(plan))
        return
    print_table(plan_title(plan), layer_rows(plan))
    click.echo()
    print_grid(table_console(), prediction_table(plan))
    click.echo()
    for line in [*verdicts(planned), *(f"Assumed: {note}." for note in plan.notes)]:
        click.echo(line)
