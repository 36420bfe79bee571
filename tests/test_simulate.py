"""`bel-profile simulate`: equal to plain replays, through the command, and what it refuses."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.console import run_command
from bel.formats.trace import DECODE, PROMPT, TraceWriter
from bel.formats.trace_calls import read_trace
from bel.formats.trace_header import TraceHeader, TraceLayer
from bel.profiler.cli import NAME, main_group
from bel.profiler.curves import lru_curves
from bel.profiler.simulate import BELADY, LRU, ORACLE, Policy, Row, count_work, rows_json, simulate
from bel.profiler.slot_budgets import Budget
from routes import write_trace

PHASES = {"decode": {DECODE}, "prompt": {PROMPT}, "all": {PROMPT, DECODE}}
ROW_KEYS = [
    "policy",
    "scope",
    "slots_by_layer",
    "bytes",
    "phase",
    "accesses",
    "hits",
    "misses",
    "cold_misses",
    "hit_rate",
    "bytes_per_token",
    "regret",
    "seconds_per_token",
]
Calls = list[tuple[int, int, list[list[int]]]]  # (phase, place of the layer, rows of ids)
LAYERS = (TraceLayer(3, 5, 2, 1000), TraceLayer(7, 4, 2, 10))


def trace_of(path: Path, calls: Calls, layers: Sequence[TraceLayer] = LAYERS, **identity: str) -> Path:
    header = {"model_name": "tiny", "arch": "qwen3moe", "fingerprint": "f1", "workload": "chat", **identity}
    with TraceWriter(path, TraceHeader(layers=tuple(layers), **header), sync=False) as writer:  # type: ignore[arg-type]
        for number, (phase, place, rows) in enumerate(calls):
            tokens = np.arange(number, number + len(rows))
            writer.append(phase=phase, ubatch=number, layer=layers[place].layer, tokens=tokens, ids=np.array(rows, np.uint16))
    return path


def steps(*rows: list[int], phase: int = DECODE) -> Calls:
    """One call of the first layer for each row."""
    return [(phase, 0, [row]) for row in rows]


CYCLE = steps(*([[0, 1], [1, 2], [2, 3], [3, 0]] * 6))
FOUR = (TraceLayer(0, 4, 2, None),)


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `simulate` in a folder of its own: exit status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = run_command(main_group, NAME, [str(a) for a in arguments])
        return (status, *capsys.readouterr())

    return lambda *arguments: run("simulate", *arguments)


def rows_of(answer: tuple[int, str, str]) -> list[dict[str, Any]]:
    """The rows of the one JSON object on stdout."""
    status, out, err = answer
    assert (status, out.count("\n")) == (0, 1), err
    got = json.loads(out, parse_constant=pytest.fail)
    assert list(got) == ["rows"]
    rows: list[dict[str, Any]] = got["rows"]
    return rows


def replay_lru(calls: Calls, place: int, slots: int, phases: set[int]) -> tuple[int, int, int]:
    """Accesses, hits and cold misses of one layer, as PROFILING.md words the rules: a list, the least recent first."""
    cache: list[int] = []
    seen: set[int] = set()
    accesses = hits = cold = 0
    for phase, where, rows in calls:
        if where != place:
            continue
        cache = cache[max(len(cache) - slots, 0) :]
        used = {e for row in rows for e in row}
        if phase in phases:
            accesses, hits, cold = accesses + len(used), hits + len(used & set(cache)), cold + len(used - seen)
        seen |= used
        for e in [e for row in rows for e in row]:
            cache = [x for x in cache if x != e] + [e]
    return accesses, hits, cold


def replay_set(calls: Calls, place: int, resident: set[int], phases: set[int]) -> tuple[int, int]:
    """Hits and cold misses of a fixed set."""
    seen: set[int] = set()
    hits = cold = 0
    for phase, where, rows in calls:
        if where == place:
            used = {e for row in rows for e in row}
            if phase in phases:
                hits, cold = hits + len(used & resident), cold + len(used - resident - seen)
            seen |= used
    return hits, cold


@st.composite
def mixed_calls(draw: st.DrawFn) -> Calls:
    place = draw(st.integers(0, 1))
    row = st.permutations(range(LAYERS[place].n_expert)).map(lambda p: p[:2])
    other = st.permutations(range(LAYERS[1 - place].n_expert)).map(lambda p: p[:2])
    phase = st.sampled_from([PROMPT, DECODE])
    mine = st.tuples(phase, st.just(place), st.lists(row, min_size=1, max_size=3))
    yours = st.tuples(phase, st.just(1 - place), st.lists(other, min_size=1, max_size=3))
    return draw(st.lists(st.one_of(mine, yours), max_size=16))


@settings(max_examples=60)
@given(st.lists(mixed_calls(), min_size=1, max_size=3), st.sampled_from(sorted(PHASES)))
def test_lru_is_a_replay_of_each_run_and_layer(runs: list[Calls], phase: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        traces = [read_trace(trace_of(Path(folder, f"{i}"), calls)) for i, calls in enumerate(runs)]
    work = count_work(traces, LAYERS, phase)
    budgets = [Budget((a, b)) for a in range(6) for b in range(5)]
    for row, budget in zip(simulate(work, [Policy(LRU)], budgets, {}), budgets, strict=True):
        parts = [replay_lru(calls, at, budget.slots[at], PHASES[phase]) for calls in runs for at in (0, 1)]
        assert (row.accesses, row.hits, row.cold_misses) == tuple(map(sum, zip(*parts, strict=True)))
        assert row.slots_by_layer == dict(zip((3, 7), budget.slots, strict=True))
    tokens = [max(sum(len(rows) for p, at, rows in c if at == x and p in PHASES[phase]) for x in (0, 1)) for c in runs]
    assert work.tokens == sum(tokens)


@settings(max_examples=60)
@given(mixed_calls(), st.sampled_from(sorted(PHASES)))
def test_the_oracle_is_the_best_of_all_sets_and_belady_the_bound_of_lru(calls: Calls, phase: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = read_trace(trace_of(Path(folder, "x"), calls))
    work = count_work([trace], LAYERS, phase)
    cold = sum(lru_curves(c)[p].cold_misses for c in trace.layers for p in PHASES[phase])
    for slots in range(6):
        budget = Budget((slots, min(slots, 4)))
        oracle, lru, best = simulate(work, [Policy(ORACLE), Policy(LRU), Policy(BELADY)], [budget], {})
        sets = [{e for e in range(5) if mask >> e & 1} for mask in range(32)]
        most = 0
        for place in (0, 1):
            fitting = [s for s in sets if len(s) == budget.slots[place] and max(s, default=0) < LAYERS[place].n_expert]
            most += max(replay_set(calls, place, s, PHASES[phase])[0] for s in fitting)
        assert oracle.hits == most
        assert lru.hits <= best.hits <= best.accesses - cold
        assert lru.cold_misses == best.cold_misses == cold
        assert oracle.cold_misses <= min(oracle.misses, cold)


def test_a_cycle_shows_the_gap_between_policies(ran: Any, tmp_path: Path) -> None:
    trace_of(tmp_path / "x.trace", CYCLE, FOUR)
    rows = rows_of(ran("x.trace", "--policy", "lru,belady", "--slots", "2,3", "--json"))
    assert [(r["policy"], r["slots_by_layer"], r["hits"]) for r in rows] == [
        ("lru", {"0": 2}, 23),
        ("belady", {"0": 2}, 23),
        ("lru", {"0": 3}, 23),
        ("belady", {"0": 3}, 34),
    ]
    for r in rows:
        assert list(r) == ROW_KEYS
        assert list(r["bytes_per_token"]) == ["nvme", "h2d", "d2h"]
        assert (r["accesses"], r["misses"], r["cold_misses"]) == (48, 48 - r["hits"], 4)
        assert (r["scope"], r["phase"], r["hit_rate"]) == ("layer", "decode", r["hits"] / 48)


def test_regret_by_hand() -> None:
    """One slot of two experts, used 0 0 0 0 1 1: Belady and LRU 4 of 6, a set drawn at random 3, the set {1} 2."""
    with tempfile.TemporaryDirectory() as folder:
        one = (TraceLayer(0, 2, 1, 100),)
        trace = read_trace(trace_of(Path(folder, "x"), steps([0], [0], [0], [0], [1], [1]), one))
    work = count_work([trace], one, "decode")
    empty, half, full = (Budget((n,)) for n in (0, 1, 2))
    rows = simulate(work, [Policy(BELADY), Policy(LRU), Policy(ORACLE)], [half], {})
    assert [(r.hits, r.cold_misses, r.regret) for r in rows] == [(4, 2, 0.0), (4, 2, 0.0), (4, 1, 0.0)]
    assert [r.missed_bytes_per_token for r in rows] == [200 / 6] * 3
    assert [r.slots_bytes for r in rows] == [100] * 3
    (nothing,) = simulate(work, [Policy(LRU)], [empty], {})
    assert (nothing.hits, nothing.misses, nothing.cold_misses, nothing.regret) == (0, 6, 2, None)
    # The random set of all experts is loaded beforehand and has more hits than Belady, whose cache starts empty.
    best, whole = simulate(work, [Policy(BELADY), Policy(ORACLE)], [full], {})
    assert (best.hits, best.regret, whole.hits, whole.cold_misses, whole.regret) == (4, None, 6, 0, None)


def counts_profile(ran_folder: Path, layers: dict[str, list[int]], name: str = "set", **changes: Any) -> str:
    body = {"model": "tiny", "fingerprint": "f1", "n_expert": 4, "top_k": 2, "counts": layers}
    body["tokens"] = sum(next(iter(layers.values()))) // 2
    (ran_folder / "counts").write_text(json.dumps({**body, **changes}))
    command = ["import", "counts", "--from", "counts-json", "--workload", name, "-o", f"{name}.json", "--force"]
    assert run_command(main_group, NAME, command) == 0
    return f"{name}.json"


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


def test_each_trace_is_a_run_from_an_empty_cache(ran: Any, tmp_path: Path) -> None:
    trace_of(tmp_path / "a.trace", steps([0, 1], [0, 1]), FOUR)
    trace_of(tmp_path / "b.trace", steps([0, 1]), FOUR, workload="code")
    (row,) = rows_of(ran("a.trace", "b.trace", "--policy", "lru", "--slots", 4, "--json"))
    assert [row[k] for k in ("accesses", "hits", "misses", "cold_misses")] == [6, 2, 4, 4]
    trace_of(tmp_path / "c.trace", steps([0, 1]), FOUR, fingerprint="f2")
    status, out, err = ran("a.trace", "b.trace", "c.trace", "--json")
    assert (status, out) == (3, "")
    assert all(word in err for word in ("a.trace", "c.trace", "f1", "f2"))
    other = counts_profile(tmp_path, {"0": [2, 2, 2, 2]}, fingerprint="f3")
    assert ran("a.trace", "--policy", f"static:{other}")[0] == 3


def test_the_cache_sees_the_prompt_that_does_not_count(ran: Any, tmp_path: Path) -> None:
    trace_of(tmp_path / "x.trace", steps([0, 1], phase=PROMPT) + steps([1, 2]), FOUR)
    got = {}
    for phase in PHASES:
        lru, best = rows_of(ran("x.trace", "--policy", "lru,belady", "--slots", 2, "--phase", phase, "--json"))
        assert [lru[k] for k in ("hits", "phase")] == [best["hits"], phase]
        got[phase] = [lru[k] for k in ("accesses", "hits", "cold_misses")]
    assert got == {"decode": [2, 1, 1], "prompt": [2, 0, 2], "all": [4, 1, 3]}


def test_slots_above_the_experts_are_clamped_and_said(ran: Any, tmp_path: Path) -> None:
    trace_of(tmp_path / "x.trace", [(DECODE, 0, [[0, 1]]), (DECODE, 1, [[0, 1]])])
    answer = ran("x.trace", "--policy", "lru", "--slots", "0,5,6", "--json")
    assert [r["slots_by_layer"] for r in rows_of(answer)] == [{"3": 0, "7": 0}, {"3": 5, "7": 4}, {"3": 5, "7": 4}]
    assert answer[2].splitlines() == [
        "bel-profile: --slots 5 is more than there are: clamped to the 4 experts of layer 7",
        "bel-profile: --slots 6 is more than there are: clamped to the 5 experts of layer 3 and to the 4 experts of layer 7",
    ]


def test_fractions_are_rounded_down_exactly(ran: Any, tmp_path: Path) -> None:
    hundred = (TraceLayer(0, 100, 1, None), TraceLayer(1, 10, 1, None))
    trace_of(tmp_path / "x.trace", [], hundred)
    rows = rows_of(ran("x.trace", "--policy", "lru", "--fraction", "0.29,.57,0,1,1.0", "--json"))
    slots = [tuple(r["slots_by_layer"].values()) for r in rows]
    assert slots == [(29, 2), (57, 5), (0, 0), (100, 10), (100, 10)]
    rows = rows_of(ran("x.trace", "--json"))
    assert [tuple(r["slots_by_layer"].values()) for r in rows[::3]] == [(25, 2), (50, 5), (75, 7)]
    assert [r["policy"] for r in rows[:3]] == ["static-oracle", "lru", "belady"]


def test_bytes_are_shared_equally_and_never_below_top_k(ran: Any, tmp_path: Path) -> None:
    trace_of(tmp_path / "x.trace", [(DECODE, 0, [[0, 1]]), (DECODE, 1, [[0, 1]]), (DECODE, 1, [[2, 3]])])
    answer = ran("x.trace", "--policy", "lru", "--bytes", 7999, "--json")
    (row,) = rows_of(answer)
    assert (row["slots_by_layer"], row["bytes"]) == ({"3": 3, "7": 4}, 3 * 1000 + 4 * 10)
    assert "clamped to the 4 experts of layer 7" in answer[2]
    assert row["bytes_per_token"] == {"nvme": (2 * 1000 + 4 * 10) / 2, "h2d": None, "d2h": None}
    status, out, err = ran("x.trace", "--policy", "lru", "--bytes", 3999, "--json")
    assert (status, out) == (2, "")
    assert "The smallest --bytes that works is 4000" in err
    assert rows_of(ran("x.trace", "--policy", "lru", "--bytes", 4000, "--json"))[0]["slots_by_layer"] == {"3": 2, "7": 4}


def test_what_is_not_known_is_null(ran: Any, tmp_path: Path) -> None:
    layers = (LAYERS[0], TraceLayer(7, 4, 2, None))
    trace_of(tmp_path / "x.trace", [(DECODE, 0, [[0, 1]])], layers)
    for row in rows_of(ran("x.trace", "--slots", 3, "--json")):
        nothing = {"nvme": None, "h2d": None, "d2h": None}
        assert (row["bytes"], row["bytes_per_token"], row["seconds_per_token"]) == (None, nothing, None)
    status, _, err = ran("x.trace", "--bytes", "1G")
    assert (status, "no input knows those of layer 7" in err) == (2, True)
    trace_of(tmp_path / "sizes.trace", [], LAYERS)  # another trace of the model may know
    assert rows_of(ran("x.trace", "sizes.trace", "--bytes", "1G", "--json"))[0]["bytes"] == 5040


def test_work_without_tokens_has_no_rates(ran: Any, tmp_path: Path) -> None:
    trace_of(tmp_path / "x.trace", steps([0, 1], phase=PROMPT))
    answer = ran("x.trace", "--slots", "0,3", "--json")
    for row in rows_of(answer):
        assert [row[k] for k in ("accesses", "hits", "misses", "cold_misses")] == [0] * 4
        assert (row["hit_rate"], row["regret"], row["bytes_per_token"]["nvme"]) == (None, None, None)
    assert "there are no decode tokens in x.trace" in answer[2]
    assert ran("x.trace")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "random"], ["'random' is not built yet", "static-oracle"]),
        (["--policy", "lru,lfu-decay:0.98"], ["'lfu-decay:0.98' is not built yet", "belady"]),
        (["--policy", "repick:500"], ["'repick:500' is not built yet"]),
        (["--policy", "LRU"], ["'LRU' is not known", "lru, belady"]),
        (["--policy", ""], ["'' is not known"]),
        (["--policy", "lru,"], ["'' is not known"]),
        (["--policy", "static:"], ["'static:' is not known", "static:PROFILE.json"]),
        (["--scope", "global"], ["--scope global is not built yet", "--scope layer"]),
        (["--host-bytes", "8G"], ["--host-bytes is not built yet", "Supported"]),
        (["--host-tier", "inclusive"], ["--host-tier is not built yet"]),
        (["--on-miss", "cpu"], ["--on-miss is not built yet"]),
        (["--held-out", "0.5"], ["--held-out is not built yet"]),
        (["--costs", "costs.json"], ["--costs is not built yet"]),
        (["--slots", "4", "--bytes", "8G"], ["--slots and --bytes exclude each other"]),
        (["--slots", "-1"], ["'-1' is not a number of slots"]),
        (["--slots", "2,"], ["'' is not a number of slots"]),
        (["--slots", "1.5"], ["'1.5' is not a number of slots"]),
        (["--slots", "9" * 5000], ["is not a number of slots"]),
        (["--fraction", "1.01"], ["'1.01' is not a number from 0 to 1"]),
        (["--fraction", "nan"], ["'nan' is not a number from 0 to 1"]),
        (["--fraction", "50%"], ["A quarter is 0.25"]),
        (["--bytes", "lots"], ["'lots' is not a size"]),
        (["--phase", "both"], ["--phase"]),
    ],
)
def test_what_is_refused(ran: Any, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    trace_of(tmp_path / "x.trace", CYCLE, FOUR)
    status, out, err = ran("x.trace", "--json", *arguments)
    assert (status, out) == (2, "")
    assert all(word in err for word in words), err


def test_inputs_that_are_no_traces(ran: Any, tmp_path: Path) -> None:
    trace_of(tmp_path / "x.trace", CYCLE, FOUR)
    profile = counts_profile(tmp_path, {"0": [2, 2, 2, 2]})
    for arguments in ([profile], ["x.trace", "--policy", "static:x.trace"]):
        status, out, err = ran(*arguments, "--json")
        assert (status, out) == (3, ""), err
        assert arguments[-1].removeprefix("static:") in err
    assert ran()[0] == 2
    torn = (tmp_path / "x.trace").read_bytes()[:-5]
    (tmp_path / "torn.trace").write_bytes(torn)
    assert "torn.trace: the trace is torn" in ran("torn.trace", "--json")[2]


def test_the_table(ran: Any, tmp_path: Path) -> None:
    write_trace(tmp_path / "x.trace", "chat", [(20, 30)])
    status, out, err = ran("x.trace", "--policy", "lru,belady", "--slots", "4,8")
    assert (status, err) == (0, "")
    rows = rows_of(ran("x.trace", "--policy", "lru,belady", "--slots", "4,8", "--json"))
    lines = out.splitlines()
    assert lines[0] == f"{rows[0]['accesses']} accesses of 30 decode tokens in 1 trace"
    assert len({len(line) for line in lines[1:6]}) == 1, "columns stand below each other"
    for line, row in zip(lines[2:6], rows, strict=True):
        slots = str(row["slots_by_layer"]["0"])
        shown = [row["policy"], slots, f"{100 * row['hit_rate']:.1f} %", f"{row['misses'] / 30:.2f}", f"{row['regret']:.2f}"]
        assert all(f" {cell} " in f" {line} " for cell in shown), (shown, line)


def test_rows_are_json_without_a_command() -> None:
    row = Row("lru", "layer", "decode", {0: 1}, 10, 4, 8, 2, 1, 60, 0.5)
    (got,) = rows_json([row])
    assert list(got) == ROW_KEYS
    assert (got["misses"], got["hit_rate"], got["bytes_per_token"]["nvme"]) == (6, 0.25, 15.0)
