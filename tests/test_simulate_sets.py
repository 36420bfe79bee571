"""Sets that `bel-profile simulate` replays: from a profile, or of the part before the held-out one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.console import run_command
from bel.formats.errors import UsageError
from bel.formats.trace import DECODE, PROMPT
from bel.formats.trace_calls import read_trace
from bel.profiler.cli import NAME, main_group
from bel.profiler.work import count_work
from replays import mixed_calls, replay_set
from simulated import FOUR, LAYERS, PHASES, Calls, counts_profile, rows_of, simulate_in, steps, trace_of


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return simulate_in(tmp_path, capsys, monkeypatch)


def test_a_set_from_a_profile(ran: Any, tmp_path: Path) -> None:
    calls = steps([0, 1], [0, 1], [0, 2], phase=PROMPT) + steps([3, 1], [3, 0], [3, 2])
    trace_of(tmp_path / "x.trace", calls, FOUR)
    name = counts_profile(tmp_path, {"0": [1, 1, 3, 5]})
    (row,) = rows_of(ran("x.trace", "--policy", f"static:{name}", "--slots", 2, "--json"))
    assert row["policy"] == "static:set.json"
    hits, cold = replay_set(calls, 0, {3, 2}, {DECODE})
    assert (row["hits"], row["cold_misses"], row["accesses"]) == (hits, cold, 6) == (4, 0, 6)
    (row,) = rows_of(ran("x.trace", "--policy", f"static:{name}", "--slots", 1, "--phase", "decode", "--json"))
    assert (row["hits"], row["cold_misses"]) == replay_set(calls, 0, {3}, {DECODE})
    status, out, err = ran("x.trace", "--policy", f"static:{name}", "--phase", "prompt", "--json")
    assert (status, out) == (2, "")
    assert "set.json: the profile has no prompt selections in layer 0" in err


def test_a_merged_profile_counts_its_workloads_by_weight(ran: Any, tmp_path: Path) -> None:
    many = counts_profile(tmp_path, {"0": [0, 60, 40, 100]}, "many")  # shares 0, 0.3, 0.2, 0.5 of 100 tokens
    few = counts_profile(tmp_path, {"0": [9, 0, 6, 5]}, "few")  # shares 0.45, 0, 0.3, 0.25 of 10 tokens
    for weight, best in (("equal", {3, 2}), ("tokens", {3, 1})):
        merge = ["--merge", many, few, "-o", "m.json", "--weight", weight]
        assert run_command(main_group, NAME, merge) == 0
        trace_of(tmp_path / f"{weight}.trace", steps(sorted(best), [0, 3]), FOUR)
        (row,) = rows_of(ran(f"{weight}.trace", "--policy", "static:m.json", "--slots", 2, "--json"))
        assert row["hits"] == 3, weight


def test_a_part_is_held_out(ran: Any, tmp_path: Path) -> None:
    """The first half uses 0 and 1, the second 2 and 3 and at last 0: a set of the first half is right once."""
    calls = steps([0, 1], [0, 1], [0, 1], [2, 3], [2, 3], [2, 0])
    trace_of(tmp_path / "x.trace", calls, FOUR)
    answer = ran("x.trace", "--policy", "static,static-oracle,lru,belady", "--slots", "2", "--held-out", "0.5", "--json")
    rows = rows_of(answer)
    assert [(r["hits"], r["accesses"], r["cold_misses"]) for r in rows] == [(1, 6, 2), (5, 6, 0), (3, 6, 2), (3, 6, 2)]
    assert "the last 50.0 %, held out between token halves" in ran("x.trace", "--policy", "lru", "--held-out", "0.5")[1]
    assert "the last 16.7 %, held out" in ran("x.trace", "--policy", "lru", "--held-out", "0.001")[1], (
        "no smaller part is there"
    )
    third = rows_of(ran("x.trace", "--policy", "static,lru", "--slots", "2", "--held-out", "0.17", "--json"))
    assert [(r["hits"], r["accesses"]) for r in third] == [(1, 2), (1, 2)], "of equal counts the lower id is in the set"
    trace_of(tmp_path / "b.trace", steps([1, 2]), FOUR)
    rows = rows_of(ran("x.trace", "b.trace", "--policy", "static,lru", "--slots", "2", "--held-out", "0.5", "--json"))
    assert [(r["hits"], r["accesses"], r["cold_misses"]) for r in rows] == [(1, 2, 1), (0, 2, 2)], "runs are kept whole"
    trace_of(tmp_path / "one.trace", steps([1, 2]), FOUR)
    status, out, err = ran("one.trace", "--policy", "lru", "--held-out", "0.5", "--json")
    assert (status, out) == (2, "")
    assert "there are not two calls to part the work between" in err


@settings(max_examples=60)
@given(st.lists(mixed_calls(), min_size=1, max_size=3), st.floats(0.05, 0.95), st.sampled_from(sorted(PHASES)))
def test_held_out_parts_are_whole_and_the_same_in_all_layers(runs: list[Calls], share: float, phase: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        traces = [read_trace(trace_of(Path(folder, f"{i}"), calls)) for i, calls in enumerate(runs)]
    everything = count_work(traces, LAYERS, phase)
    try:
        work = count_work(traces, LAYERS, phase, held_out=share)
    except UsageError as error:
        assert "--held-out" in str(error)
        rows = [[[len(r) for p, at, r in c if p in PHASES[phase] and at == x] for x in (0, 1)] for c in runs]
        assert sum(len(max(layers, key=lambda calls: (sum(calls), len(calls)))) for layers in rows) < 2
        return
    for place in (0, 1):
        whole, part = everything.counts[place], work.counts[place]
        assert (part.uses + part.earlier_uses).tolist() == whole.uses.tolist()
        marks = [
            (number, int(u), bool(m))
            for number, (run, masks) in enumerate(zip(work.runs, work.counted, strict=True))
            for u, m, p in zip(run[place].ubatch, masks[place], run[place].phase, strict=True)
            if p in PHASES[phase]
        ]
        assert [m for *_, m in sorted(marks)] == sorted(m for *_, m in marks), "first the others, then those that count"
    assert 0 < sum(c.accesses for c in work.counts) < sum(c.accesses for c in everything.counts)
