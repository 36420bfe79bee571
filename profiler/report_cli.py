"""`bel-profile report`: tables on a terminal, a page, or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bel.formats.console import SETTINGS, json_option, print_json, say
from bel.formats.errors import UsageError
from bel.formats.staging import replace_file
from bel.profiler.output import check_inputs, check_output
from bel.profiler.page import need_plot
from bel.profiler.table_cli import print_grid, table_console

if TYPE_CHECKING:
    from bel.profiler.answers import Report

NAME = "bel-profile"
_PATH = click.Path(path_type=Path)


@click.command("report", context_settings=SETTINGS)
@click.argument("inputs", nargs=-1, required=True, type=_PATH, metavar="PROFILE_OR_TRACE...")
@click.option("--html", "page", type=_PATH, help="Also write one self-contained page with figures.")
@click.option(
    "--phase",
    type=click.Choice(["decode", "prompt", "all"]),
    default="decode",
    show_default=True,
    help="The tokens that count; the cache sees all of them.",
)
@click.option("--one-by-one", is_flag=True, help="Serve prompts token by token, as if the same text were decoded.")
@click.option("--force", is_flag=True, help="Replace an existing page.")
@json_option
def report_command(
    inputs: tuple[Path, ...], page: Path | None, phase: str, one_by_one: bool, force: bool, as_json: bool
) -> None:
    """Show what profiles and traces of one model say: how local its experts are, and what a cache of them would hit.

    Traces show all; a profile alone shows what it holds.  Traces of one workload are pooled, workloads stay apart.

    \b
    Examples:
      bel-profile report code.trace chat.trace
      bel-profile report code.trace chat.trace --html report.html
      bel-profile report merged.json --json
      bel-profile report code.trace --phase prompt --one-by-one
    """
    from bel.profiler.measure import View, measure
    from bel.profiler.report import make_report, report_json

    check_inputs(inputs)
    if page is not None:
        check_output(page, inputs, force=force, replaces="")
        need_plot()
    measured = measure(inputs, View(phase, one_by_one))
    for note in measured.notes:
        say(NAME, note)
    untraced = [w.name for w in measured.workloads if not w.is_traced]
    if one_by_one and untraced:
        raise UsageError(f"--one-by-one serves a trace anew, and {', '.join(untraced)} comes from a profile: {inputs[0]}")
    report = make_report(measured)
    if page is not None:
        from bel.profiler.report_page import make_page

        replace_file(page, make_page(report).encode())
        say(NAME, f"wrote {page}")
    if as_json:
        print_json(report_json(report))
    else:
        _print_report(report)


def _print_report(report: Report) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from bel.profiler.report_tables import all_tables, phase_words
    from bel.profiler.verdicts import verdicts

    console = table_console()
    console.print(Text(f"{report.model_name or '(no name)'}: {phase_words(report)}", style="bold"))
    for verdict in verdicts(report):
        console.print(Text("\n" + verdict.question, style="bold cyan"))
        for answer in verdict.answers:
            console.print(Padding(Text(answer), (0, 0, 0, 2), expand=False))
    for line in report.missing:
        console.print(Text(f"\nmissing: {line}", style="yellow"))
    for table in all_tables(report):
        console.print(Text("\n" + table.title, style="bold cyan"))
        print_grid(console, table)
        if table.note:
            console.print(Text(table.note, style="dim"))
