"""Ours beside stock llama.cpp, in turn: the cases, the table and the bars."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_repack import Bar
from rich.console import Console
from rich.table import Table
from runs import OPENMP, Case, Runner, Took, best_speed, figure, loaded

from bel.runtime.bench_report import MAX_OTHER_CORES

MIN_TIMES_CAPPED = {"A": 60.0, "B": 19.0}
MIN_OF_UNCAPPED = {"A": 0.6, "B": 0.42}
FIGURES = (
    ("decode t/s", "decode_tokens_per_s", "{:.2f}"),
    ("median", "median_tokens_per_s", "{:.2f}"),
    ("last half", "last_half_tokens_per_s", "{:.2f}"),
    ("prompt t/s", "prompt_tokens_per_s", "{:.1f}"),
    ("hit rate", "hit_rate", "{:.3f}"),
    ("MB/token", "read_mb_per_token", "{:.1f}"),
    ("wait ms", "wait_ms_per_token", "{:.1f}"),
    ("callback ms", "callback_ms_per_token", "{:.1f}"),
    ("hidden", "hidden_ratio", "{:.2f}"),
    ("faults, last half", "last_half_major_faults_per_token", "{:.2f}"),
)


@dataclass(frozen=True, slots=True)
class Bench:
    """What the parts share."""

    options: argparse.Namespace
    console: Console
    no_cap: str | None
    drop: bool

    def runner(self, text: Path | None) -> Runner:
        """Runs with these tokens."""
        return Runner(self.options.prompt_tokens, text, self.drop)

    def say(self, line: str) -> None:
        """A line of progress."""
        self.console.print(f"[dim]{line}[/]", highlight=False)

    def limit(self, size_bytes: int) -> int | None:
        """A cap, or none where none can be had."""
        return None if self.no_cap else size_bytes


@dataclass(frozen=True, slots=True)
class Rivals:
    """Stock's decode speeds: the best without a cap, and under the cap (None where it was not or could not be measured)."""

    uncapped: float
    capped: float | None


def stock_cases(bench: Bench, model: Path, limit_bytes: int) -> list[Case]:
    """Stock llama.cpp: without a cap by OpenMP's ways to wait, and under the cap with few tokens, for it takes seconds each."""
    options = bench.options
    free = [
        Case(f"stock, no cap{name}", model, ("--stock",), None, environment, options.tokens, is_warm=True)
        for name, environment in OPENMP.items()
    ]
    if bench.no_cap:
        return free
    name = f"stock, capped, {options.stock_tokens} tokens"
    return [*free, Case(name, model, ("--stock",), limit_bytes, {}, options.stock_tokens)]


def compare(
    bench: Bench, part: str, title: str, model: Path, ours: Sequence[Case], judged: str, limit_bytes: int, text: Path | None
) -> Generator[Bar, None, dict[str, list[Took]]]:
    """Measure stock and ours, print the table, and give the bars, by the one of ours that is named `judged`; then the runs."""
    limit = bench.limit(limit_bytes)
    stock = stock_cases(bench, model, limit_bytes)
    mine = [Case(c.name, c.model, c.arguments, limit, {}, bench.options.tokens) for c in ours]
    bench.say(title)
    found = bench.runner(text).run_all([*stock, *mine], bench.options.rounds, bench.say)
    rivals = _rivals(found, stock, limit)
    tokens = f"{bench.options.prompt_tokens} + {bench.options.tokens} tokens, {bench.options.rounds} rounds"
    bench.console.print(speed_table(f"{title}, {tokens}", found, rivals))
    if (others := loaded(found)) > MAX_OTHER_CORES:
        bench.console.print(f"[bold red]the machine was loaded: others kept up to {others:.1f} cores busy[/]")
    yield from _bars(part, found, judged, rivals)
    if limit is not None:
        if rivals.capped is None:
            yield Bar(f"{part}: stock under the cap", found[stock[-1].name][0].failed, "a figure", False)
        theirs = figure(found[stock[-1].name], "prompt_tokens_per_s")
        ratio = (figure(found[judged], "prompt_tokens_per_s") or 0.0) / theirs if theirs else 0.0
        yield at_least(f"{part}: prompt, of stock's under the cap ({judged})", ratio, 1.0)
    return found


def _rivals(found: dict[str, list[Took]], stock: Sequence[Case], limit: int | None) -> Rivals:
    free = [best_speed(found[case.name]) for case in stock if case.limit_bytes is None]
    known = [speed for speed in free if speed is not None]
    if len(known) < len(free):
        sys.exit(f"stock llama.cpp does not run: {found[stock[0].name][0].failed}")
    return Rivals(max(known), None if limit is None else figure(found[stock[-1].name], "decode_tokens_per_s"))


def _bars(part: str, found: dict[str, list[Took]], judged: str, rivals: Rivals) -> Iterator[Bar]:
    speed = figure(found[judged], "decode_tokens_per_s") or 0.0
    yield at_least(f"{part}: decode, of stock's best without a cap ({judged})", speed / rivals.uncapped, MIN_OF_UNCAPPED[part])
    if rivals.capped is not None:
        times = speed / rivals.capped
        yield at_least(f"{part}: decode, times stock under the cap ({judged})", times, MIN_TIMES_CAPPED[part])
    faults = figure(found[judged], "last_half_major_faults_per_token")
    yield Bar(f"{part}: major faults per token, last half ({judged})", str(faults), "0", faults == 0)


def at_least(what: str, found: float, wanted: float) -> Bar:
    """A bar on a ratio."""
    return Bar(what, f"{found:.2f}", f"at least {wanted:g}", found >= wanted)


def speed_table(title: str, found: dict[str, list[Took]], rivals: Rivals) -> Table:
    """The figures of cold passes, and for what also ran warm its speed then."""
    ends = ("of no cap", "x capped", "warm t/s", "peak MB", "charged MB")
    table = Table(title=title, title_justify="left")
    table.add_column("what", no_wrap=True)
    for column in (*(name for name, _, _ in FIGURES), *ends):
        table.add_column(column, justify="right")
    for name, runs in found.items():
        answers = [run.answer for run in runs if run.answer is not None]
        if len(answers) < len(runs):
            table.add_row(name, next(run.failed for run in runs if run.failed))
            continue
        cells = [shown(figure(runs, key), form) for _, key, form in FIGURES]
        speed = figure(runs, "decode_tokens_per_s") or 0.0
        cells.append(shown(speed / rivals.uncapped, "{:.2f}"))
        cells.append(shown(speed / rivals.capped if rivals.capped else None, "{:.1f}"))
        cells.append(shown(figure(runs, "decode_tokens_per_s", 1) if len(answers[0]["passes"]) > 1 else None, "{:.2f}"))
        cells.append(shown(max(answer["peak_rss_bytes"] for answer in answers) / 1e6, "{:.0f}"))
        charged = [run.charged_bytes for run in runs if run.charged_bytes is not None]
        table.add_row(name, *cells, shown(max(charged) / 1e6 if charged else None, "{:.0f}"))
    return table


def shown(value: float | None, form: str) -> str:
    """A figure for a table."""
    return "-" if value is None else form.format(value)
