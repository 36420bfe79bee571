"""`bel-profile report`: tables on a terminal, a page, or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bel.formats.console import SETTINGS, json_option, print_json, rich_console, say
from bel.formats.errors import MachineError, UsageError
from bel.formats.staging import replace_file
from bel.profiler.output import check_inputs, check_output

if TYPE_CHECKING:
    from rich.console import Console

    from bel.profiler.answers import Report
    from bel.profiler.report_tables import Table

NAME = "bel-profile"
_PATH = click.Path(path_type=Path)
_FILE_COLUMNS = 150  # a pipe or file has no width; the widest table fits


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
        _need_plot()
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


def _need_plot() -> None:
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        raise MachineError("--html needs matplotlib", hint="Install it with: pip install 'bel-toolkit[plot]'") from None


def _print_report(report: Report) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from bel.profiler.report_tables import all_tables, phase_words
    from bel.profiler.verdicts import verdicts

    console = rich_console()
    if not console.is_terminal:
        console = rich_console(width=_FILE_COLUMNS)
    console.print(Text(f"{report.model_name or '(no name)'}: {phase_words(report)}", style="bold"))
    for verdict in verdicts(report):
        console.print(Text("\n" + verdict.question, style="bold cyan"))
        for answer in verdict.answers:
            console.print(Padding(Text(answer), (0, 0, 0, 2), expand=False))
    for line in report.missing:
        console.print(Text(f"\nmissing: {line}", style="yellow"))
    for table in all_tables(report):
        console.print(Text("\n" + table.title, style="bold cyan"))
        _print_table(console, table)
        if table.note:
            console.print(Text(table.note, style="dim"))


def _print_table(console: Console, table: Table) -> None:
    """Heads wrap between words where the terminal is narrow; a number is never wrapped or cut."""
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    cells = list(zip(*table.rows, strict=True))
    least = [max(map(len, [*column, *head.split()])) for head, column in zip(table.columns, cells, strict=True)]
    most = [max(width, len(head)) for head, width in zip(table.columns, least, strict=True)]
    is_wide = sum(most) + 3 * len(most) <= console.width
    grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1) if is_wide else (0, 1, 0, 0))
    for i, head in enumerate(table.columns):
        width = most[i] if is_wide else least[i]
        grid.add_column(Text(head), justify="left" if i < table.labels else "right", width=width)
    for row in table.rows:
        grid.add_row(*map(Text, row))
    # A console as wide as the table: rich would squeeze its cells into a narrower one.
    rich_console(width=max(console.width, sum(most) + 4 * len(most))).print(grid)
