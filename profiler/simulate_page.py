"""A simulation as one HTML page: no scripts, and nothing that is loaded from elsewhere.  Pure; needs matplotlib."""

from __future__ import annotations

from bel.profiler.page import escape, frame, section, table_html
from bel.profiler.simulate import Simulated
from bel.profiler.simulate_figures import MAX_POLICIES, hit_figure, read_figure, time_figure
from bel.profiler.simulate_tables import legend, row_table


def make_page(result: Simulated) -> str:
    """The page."""
    name = result.model_name or "(no name)"
    table = row_table(result)
    figures = [
        ("How many accesses does each policy hit?", hit_figure(result)),
        ("How long does a token take?", time_figure(result)),
        ("How much is read for each token?", read_figure(result)),
    ]
    notes = [f'<p class="note">{escape(line)}</p>' for line in legend(result)]
    if len({row.policy for row in result.rows}) > MAX_POLICIES:
        notes.insert(0, f'<p class="missing">The figures show the first {MAX_POLICIES} policies.</p>')
    body = [
        f"<h1>What a cache of experts of {escape(name)} would hit</h1>",
        f'<p class="muted">{escape(_layers(result))} {escape(table.title)}.</p>',
        *(line for title, drawing in figures if drawing is not None for line in section(title, [drawing], [])),
        *section("The numbers", [], [table_html(table), *notes]),
    ]
    return frame(f"Simulated caches of {name}", body)


def _layers(result: Simulated) -> str:
    layers = result.work.layers
    experts = sorted({x.n_expert for x in layers})
    shown = str(experts[0]) if len(experts) == 1 else f"{experts[0]} to {experts[-1]}"
    return f"{len(layers)} MoE layers of {shown} experts."
