"""The frame, figures and tables of one HTML page: no scripts, and nothing that is loaded from elsewhere.  Pure."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from bel.formats.errors import MachineError
from bel.profiler.table import Table

if TYPE_CHECKING:
    from bel.profiler.svg import Drawing

_CSS = """
:root { color-scheme: light dark; --ink: #1d232b; --muted: #5c6672; --line: #d9dee4;
  --paper: #ffffff; --card: #f4f6f8; --mark: #2f7ed8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ec; --muted: #a0a9b4; --line: #3a424c; --paper: #14181d; --card: #1d232a; --mark: #6aaaf0; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", "Noto Sans", "Liberation Sans", Arial, sans-serif; }
main { max-width: 1140px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 1.25rem; margin: 48px 0 10px; padding-top: 14px; border-top: 1px solid var(--line); }
p { margin: 6px 0; }
.muted, .note { color: var(--muted); }
.note { font-size: 0.875rem; max-width: 80ch; }
.glance { display: grid; grid-template-columns: repeat(auto-fit, minmax(330px, 1fr)); gap: 14px; margin: 22px 0 0; padding: 0; }
.glance > div { background: var(--card); border-left: 4px solid var(--mark); border-radius: 4px; padding: 10px 16px 12px; }
.glance dt { font-weight: 650; margin-bottom: 2px; }
.glance dd { margin: 0 0 6px; font-size: 0.94rem; }
.answer { max-width: 90ch; }
.missing { border-left: 4px solid #d08a1d; background: var(--card); padding: 8px 16px; border-radius: 4px; margin-top: 14px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 22px 28px; }
figure { margin: 14px 0 6px; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figcaption { font-weight: 600; margin-bottom: 6px; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
figure svg image { image-rendering: pixelated; }
.scroll { overflow-x: auto; margin: 16px 0 4px; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; white-space: nowrap; font-weight: 600; padding-bottom: 4px; }
th, td { padding: 4px 20px 4px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--muted); font-weight: 550; white-space: normal; vertical-align: bottom; max-width: 9em; }
th.label, td.label { text-align: left; }
details { margin: 14px 0; }
summary { cursor: pointer; color: var(--mark); }
"""
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def need_plot() -> None:
    """Raises MachineError, saying what to install, where pages cannot be drawn."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        raise MachineError("--html needs matplotlib", hint="Install it with: pip install 'bel-toolkit[plot]'") from None


def frame(title: str, body: Iterable[str]) -> str:
    """The page of a title, not yet escaped, and parts that are HTML."""
    return _PAGE.format(title=escape(title), css=_CSS, body="\n".join(body))


def escape(text: str) -> str:
    """Text for HTML; a number stays on one line with its percent sign."""
    return html.escape(text).replace(" %", "&nbsp;%")


def section(title: str, drawings: Sequence[Drawing], tables: Iterable[str]) -> list[str]:
    """A heading, figures beside each other, and below them HTML."""
    drawn = ['<div class="figures">', *map(figure, drawings), "</div>"] if drawings else []
    return [f"<h2>{escape(title)}</h2>", *drawn, *tables]


def figure(drawing: Drawing) -> str:
    """A figure with its finding above it."""
    title = escape(drawing.title)
    svg = drawing.svg.replace('role="img"', f'role="img" aria-label="{title}"', 1)
    wide = ' class="wide"' if drawing.width_px > 700 else ""
    return f'<figure{wide} style="max-width: {drawing.width_px}px"><figcaption>{title}</figcaption>{svg}</figure>'


def table_html(table: Table) -> str:
    """A table with its title and note."""

    def cells(tag: str, row: tuple[str, ...]) -> str:
        kinds = [' class="label"' if i < table.labels else "" for i in range(len(row))]
        return "".join(f"<{tag}{kind}>{escape(text)}</{tag}>" for kind, text in zip(kinds, row, strict=True))

    rows = "".join(f"<tr>{cells('td', row)}</tr>" for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<div class="scroll"><table><caption>{escape(table.title)}</caption>'
        f"<thead><tr>{cells('th', table.columns)}</tr></thead><tbody>{rows}</tbody></table></div>{note}"
    )
