"""Write the help of every command into its page: python docs/make_help.py.  With --check: write nothing, show what differs.

The text is that of the real command at a fixed width; `tests/test_docs_help.py` holds the pages to it.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from click.testing import CliRunner

from bel.profiler.cli import main_group as profile
from bel.repack.cli import main_group as repack
from bel.runtime.cli import main_command as run

DOCS = Path(__file__).resolve().parent
WIDTH = 98
"""Columns of the help: what a terminal of 100 columns shows."""
BEGIN = "<!-- help:begin: made by `python docs/make_help.py`, do not edit -->"
END = "<!-- help:end -->"


@dataclass(frozen=True, slots=True)
class Page:
    """A program's page.  `modes`: options that make another command of it, each with a help of its own."""

    program: str
    command: click.Command
    modes: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The file that holds the help."""
        return DOCS / f"{self.program}.md"

    def calls(self) -> Iterator[list[str]]:
        """The arguments before --help, for the program itself and all that it can be told to be."""
        yield []
        if isinstance(self.command, click.Group):
            yield from ([name] for name, command in sorted(self.command.commands.items()) if not command.hidden)
        yield from ([mode] for mode in self.modes)


PAGES = (
    Page("bel-repack", repack),
    Page("bel-profile", profile),
    Page("bel-run", run, ("--bench", "--check-against")),
)


def help_text(page: Page, arguments: list[str]) -> str:
    """What `program arguments --help` prints.  Raises RuntimeError where it ends with an error."""
    said = CliRunner().invoke(page.command, [*arguments, "--help"], prog_name=page.program, terminal_width=WIDTH)
    if said.exit_code != 0:
        raise RuntimeError(f"{page.program} {' '.join(arguments)} --help: {said.exception!r} {said.output}")
    return said.stdout.rstrip("\n")


def help_section(page: Page) -> str:
    """Everything between the markers of a page, the markers included."""
    parts = [f"### `{' '.join([page.program, *call])}`\n\n```text\n{help_text(page, call)}\n```\n" for call in page.calls()]
    return "\n".join([BEGIN, "", *parts, END])


def renewed(page: Page) -> str:
    """The page's text with the help as it is now.  Raises ValueError where the markers are not there once each, in order."""
    text = page.path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"{page.path.name}: the markers of the help are missing, or stand there twice")
    return before + help_section(page) + after


def difference(page: Page) -> str:
    """A diff from the page to what it should be; empty where it is in step."""
    now, wanted = page.path.read_text(encoding="utf-8"), renewed(page)
    names = (f"docs/{page.path.name}", f"{page.program} --help")
    return "".join(difflib.unified_diff(now.splitlines(keepends=True), wanted.splitlines(keepends=True), *names))


def main(arguments: list[str]) -> int:
    """The exit status: 1 where --check finds a page out of step, 2 for another argument."""
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    changed = [page for page in PAGES if difference(page)]
    for page in changed:
        if arguments:
            sys.stdout.write(difference(page))
        else:
            page.path.write_text(renewed(page), encoding="utf-8")
            print(f"wrote docs/{page.path.name}")
    return 1 if arguments and changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
