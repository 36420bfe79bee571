"""A plan as one HTML page: no scripts, and nothing that is loaded from elsewhere.  Pure; needs matplotlib."""

from __future__ import annotations

from bel.profiler.make_plan import Planned
from bel.profiler.page import escape, frame, section, table_html
from bel.profiler.plan_figures import slot_figure, time_figure
from bel.profiler.plan_tables import layer_table, plan_title, prediction_table, verdicts


def make_page(planned: Planned) -> str:
    """The page."""
    plan = planned.plan
    name = plan.model_name or "(no name)"
    works = ", ".join(f"{w.name} (weight {w.weight:.2f})" for w in plan.workloads)
    times = time_figure(planned)
    missing = '<p class="missing">Missing: the time of a token. Plan with --costs, and layer times, to see it.</p>'
    body = [
        f"<h1>Slots for the experts of {escape(name)}</h1>",
        f'<p class="muted">{escape(plan_title(plan))}. Workloads: {escape(works)}.</p>',
        *(f'<p class="answer">{escape(line)}</p>' for line in verdicts(planned)),
        *section("Which layers get the slots?", [slot_figure(planned)], []),
        *section("Where does the time of a token go?", [times] if times else [], [] if times else [missing]),
        table_html(prediction_table(plan)),
        *(f'<p class="note">Assumed: {escape(note)}.</p>' for note in plan.notes),
        "<details><summary>The numbers of each layer</summary>",
        table_html(layer_table(planned)),
        "</details>",
    ]
    return frame(f"Expert slots for {name}", body)
