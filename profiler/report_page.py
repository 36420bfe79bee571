"""A report as one HTML page: no scripts, and nothing that is loaded from elsewhere.  Pure."""

from __future__ import annotations

from collections.abc import Iterable

from bel.profiler.answers import Report
from bel.profiler.figures import curve_figure, enough_figure, hot_figure, layer_figure, usage_figure
from bel.profiler.page import escape, frame, section, table_html
from bel.profiler.report_tables import (
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
from bel.profiler.table import Table
from bel.profiler.verdicts import Verdict, verdicts


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
    return frame(f"Router profile of {name}", body)


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
    drawn = [f for f in figures if f is not None]
    shown = [table_html(t) for t in tables if t is not None and t.rows]
    if not drawn and question not in words:
        return []
    if folded and drawn:
        shown = ["<details><summary>The numbers of each layer</summary>", *shown, "</details>"]
    return section(question, drawn, shown)
