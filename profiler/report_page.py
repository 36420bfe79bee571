"""A report as one HTML page: no scripts, and nothing that is loaded from elsewhere.  Pure."""

from __future__ import annotations

import html
from collections.abc import Iterable

from bel.profiler.answers import Report
from bel.profiler.figures import curve_figure, enough_figure, hot_figure, layer_figure, usage_figure
from bel.profiler.report_tables import (
    Table,
    enough_table,
    layer_table,
    overlap_table,
    phase_words,
    reuse_table,
    segment_table,
    size_table,
    transfer_table,
    work_table,
)
from bel.profiler.svg import Drawing
from bel.profiler.verdicts import Verdict, verdicts

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


def escape(text: str) -> str:
    """Text for HTML; a number stays on one line with its percent sign."""
    return html.escape(text).replace(" %", "&nbsp;%")


def make_page(report: Report) -> str:
    """The page."""
    words = {v.question: v for v in verdicts(report)}
    name = report.model_name or "(no name)"
    works = ", ".join(f"{w.name} ({w.prompt_tokens} prompt, {w.decode_tokens} decode tokens)" for w in report.workloads)
    arch = f" ({escape(report.arch)})" if report.arch else ""
    layers = report.workloads[0].layers
    shape = f"{len(layers)} MoE layers, {_span(x.n_expert for x in layers)} experts each, top-{_span(x.top_k for x in layers)}"
    body = [
        f"<h1>What the router of {escape(name)} does</h1>",
        f'<p class="muted">{shape}{arch}. Workloads: {escape(works)}. Counted here: {escape(phase_words(report))}.</p>',
        _glance(words.values()),
        *(f'<p class="missing">Missing: {escape(line)}.</p>' for line in report.missing),
        *_section(
            "Flat over the run, hot in the moment?",
            words,
            [hot_figure(report)],
            [work_table(report), reuse_table(report), segment_table(report)],
        ),
        *_section(
            "What would a static set, LRU and Belady hit?",
            words,
            [curve_figure(w) for w in report.workloads],
            [size_table(report)],
        ),
        *_section(
            "Which layers are which?",
            words,
            [*(layer_figure(w) for w in report.workloads), None if report.pairs else usage_figure(report)],
            [layer_table(w) for w in report.workloads],
            folded=True,
        ),
        *(
            _section("How far do the workloads overlap?", words, [usage_figure(report)], [overlap_table(report)])
            if report.pairs
            else []
        ),
        *_section("What does a set made for other work cost?", words, [], [transfer_table(report)]),
        *_section("How many tokens of profile are enough?", words, [enough_figure(report)], [enough_table(report)]),
    ]
    return _PAGE.format(title=f"Router profile of {escape(name)}", css=_CSS, body="\n".join(body))


def _span(values: Iterable[int]) -> str:
    known = sorted(set(values))
    return str(known[0]) if len(known) == 1 else f"{known[0]} to {known[-1]}"


def _glance(answers: Iterable[Verdict]) -> str:
    cards = [f"<div><dt>{escape(v.question)}</dt>{''.join(f'<dd>{escape(a)}</dd>' for a in v.answers)}</div>" for v in answers]
    return f'<dl class="glance">{"".join(cards)}</dl>'


def _section(
    question: str,
    words: dict[str, Verdict],
    figures: Iterable[Drawing | None],
    tables: Iterable[Table | None],
    *,
    folded: bool = False,
) -> list[str]:
    """Heading, figures and tables of one question; nothing where there is neither."""
    drawn = [_figure(f) for f in figures if f is not None]
    shown = [_table(t) for t in tables if t is not None and t.rows]
    if not drawn and question not in words:
        return []
    parts = [f"<h2>{escape(question)}</h2>"]
    if drawn:
        drawn = ['<div class="figures">', *drawn, "</div>"]
    if folded and drawn:
        shown = ["<details><summary>The numbers of each layer</summary>", *shown, "</details>"]
    return [*parts, *drawn, *shown]


def _figure(drawing: Drawing) -> str:
    title = escape(drawing.title)
    svg = drawing.svg.replace('role="img"', f'role="img" aria-label="{title}"', 1)
    wide = ' class="wide"' if drawing.width_px > 700 else ""
    return f'<figure{wide} style="max-width: {drawing.width_px}px"><figcaption>{title}</figcaption>{svg}</figure>'


def _table(table: Table) -> str:
    def cells(tag: str, row: tuple[str, ...]) -> str:
        kinds = [' class="label"' if i < table.labels else "" for i in range(len(row))]
        return "".join(f"<{tag}{kind}>{escape(text)}</{tag}>" for kind, text in zip(kinds, row, strict=True))

    rows = "".join(f"<tr>{cells('td', row)}</tr>" for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<div class="scroll"><table><caption>{escape(table.title)}</caption>'
        f"<thead><tr>{cells('th', table.columns)}</tr></thead><tbody>{rows}</tbody></table></div>{note}"
    )
