"""Tables on a terminal, for the commands of `bel-profile`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from bel.formats.console import rich_console

if TYPE_CHECKING:
    from rich.console import Console

    from bel.profiler.table import Table

_FILE_COLUMNS = 150  # a pipe or file has no width; the widest table fits


def table_console() -> Console:
    """The terminal, or stdout with room for every table, or the COLUMNS that the environment gives."""
    console = rich_console()
    return console if console.is_terminal or _columns() else rich_console(width=_FILE_COLUMNS)


def _columns() -> bool:
    given = os.environ.get("COLUMNS", "")
    return given.isascii() and given.isdigit() and int(given) > 0


def print_grid(console: Console, table: Table) -> None:
    """Heads and rows.  Heads wrap between words where the terminal is narrow; a number is never wrapped or cut."""
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
