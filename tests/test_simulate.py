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
from bel.formats.errors import UsageError
from bel.formats.trace import DECODE, PROMPT, TraceWriter
from bel.formats.trace_calls import read_trace
from bel.formats.trace_header import TraceHeader, TraceLayer
from bel.profiler import simulate_cli
from bel.profiler.cli import NAME, main_group
from bel.profiler.clock import KINDS, make_clock
from bel.profiler.curves import lru_curves
from bel.profiler.outcomes import Outcome, Setup, outcome, shared_set
from bel.profiler.simulate import BELADY, LRU, ORACLE, Policy, Row, knees, rows_json, simulate
from bel.profiler.slot_budgets import Budget, SharedBudget
from bel.profiler.tier_caches import HOST_TIERS
from bel.profiler.work import Work, count_work
from routes import some_row, write_trace

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
    "uploads",
    "host_hits",
    "on_cpu",
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
    assert list(got) == ["rows", "knees"]
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
    row, other = (some_row(LAYERS[at].n_expert, LAYERS[at].top_k) for at in (place, 1 - place))
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
        assert (row.accesses, row.hits, row.found.cold) == tuple(map(sum, zip(*parts, strict=True)))
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
        assert lru.found.cold == best.found.cold == cold
        assert oracle.found.cold <= min(oracle.misses, cold)


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
    assert [(r.hits, r.found.cold, r.regret) for r in rows] == [(4, 2, 0.0), (4, 2, 0.0), (4, 1, 0.0)]
    assert [r.per_token(r.found.nvme_bytes) for r in rows] == [200 / 6] * 3
    assert [r.slots_bytes for r in rows] == [100] * 3
    (nothing,) = simulate(work, [Policy(LRU)], [empty], {})
    assert (nothing.hits, nothing.misses, nothing.found.cold, nothing.regret) == (0, 6, 2, None)
    # The random set of all experts is loaded beforehand and has more hits than Belady, whose cache starts empty.
    best, whole = simulate(work, [Policy(BELADY), Policy(ORACLE)], [full], {})
    assert (best.hits, best.regret, whole.hits, whole.found.cold, whole.regret) == (4, None, 6, 0, None)


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
    assert [r["slots_by_layer"] for r in rows_of(answer)] == [{"3": 0, "7": 0}, {"3": 5, "7": 4}], (
        "what is the same is shown once"
    )
    assert answer[2].splitlines() == [
        "bel-profile: --slots 5 is more than there are: clamped to the 4 experts of layer 7",
        "bel-profile: --slots 6 is more than there are: clamped to the 5 experts of layer 3 and to the 4 experts of layer 7",
    ]


def test_fractions_are_rounded_down_exactly(ran: Any, tmp_path: Path) -> None:
    hundred = (TraceLayer(0, 100, 1, None), TraceLayer(1, 10, 1, None))
    trace_of(tmp_path / "x.trace", [], hundred)
    rows = rows_of(ran("x.trace", "--policy", "lru", "--fraction", "0.29,.57,0,1", "--json"))
    slots = [tuple(r["slots_by_layer"].values()) for r in rows]
    assert slots == [(29, 2), (57, 5), (0, 0), (100, 10)]
    rows = rows_of(ran("x.trace", "--json"))
    assert [tuple(r["slots_by_layer"].values()) for r in rows[::3]] == [(25, 2), (50, 5), (75, 7)]
    assert [r["policy"] for r in rows[:3]] == ["static-oracle", "lru", "belady"]


def test_bytes_are_shared_equally_and_few_of_them_are_told(ran: Any, tmp_path: Path) -> None:
    page = 4096
    layers = (TraceLayer(3, 5, 2, 25 * page), TraceLayer(7, 4, 2, page))
    trace_of(tmp_path / "x.trace", [(DECODE, 0, [[0, 1]]), (DECODE, 1, [[0, 1]]), (DECODE, 1, [[2, 3]])], layers)
    answer = ran("x.trace", "--policy", "lru", "--bytes", 199 * page, "--json")
    (row,) = rows_of(answer)
    assert (row["slots_by_layer"], row["bytes"]) == ({"3": 3, "7": 4}, (3 * 25 + 4) * page)
    assert "clamped to the 4 experts of layer 7" in answer[2]
    assert row["bytes_per_token"] == {"nvme": (2 * 25 + 4) * page / 2, "h2d": None, "d2h": None}
    answer = ran("x.trace", "--policy", "lru", "--bytes", f"{99 * page}, 18", "--json")
    assert [r["slots_by_layer"] for r in rows_of(answer)] == [{"3": 1, "7": 4}, {"3": 0, "7": 0}]
    told = "bel-profile: --bytes {} fewer slots than the 2 experts that a token uses; from {} bytes on none has"
    assert answer[2].splitlines() == [
        told.format(f"{99 * page} gives layer 3", 100 * page),
        told.format("18 gives layers 3, 7", 100 * page),
    ]
    assert rows_of(ran("x.trace", "--policy", "lru", "--bytes", 100 * page, "--json"))[0]["slots_by_layer"] == {"3": 2, "7": 4}


def test_bytes_buy_slots_of_whole_pages_as_in_a_bundle(ran: Any, tmp_path: Path) -> None:
    """Experts of 26112 bytes take 28672 in a bundle: what six of them weigh has no room for six slots."""
    layers = (TraceLayer(3, 5, 2, 26112), TraceLayer(7, 5, 2, 26112))
    trace_of(tmp_path / "x.trace", [(DECODE, 0, [[0, 1]])], layers)
    answer = ran("x.trace", "--policy", "lru,lru", "--bytes", f"{6 * 26112},{6 * 28672},168k", "--json")
    assert [list(r["slots_by_layer"].values()) for r in rows_of(answer)] == [[2, 2], [3, 3]]
    assert [r["bytes"] for r in rows_of(answer)] == [4 * 28672, 6 * 28672]
    assert "rounded up to 4096" in answer[2]
    (row,) = rows_of(ran("x.trace", "--policy", "lru", "--scope", "global", "--bytes", 28672 + 4096, "--json"))
    assert row["hits"] == 0


def test_an_inclusive_ram_smaller_than_vram_is_refused(ran: Any, tmp_path: Path) -> None:
    trace_of(tmp_path / "x.trace", [(DECODE, 0, [[0, 1]])], (TraceLayer(3, 5, 2, 4096),))
    tier = ("x.trace", "--policy", "lru", "--host-tier", "inclusive", "--json")
    status, out, err = ran(*tier, "--slots", "2,3", "--host-bytes", "8k")
    assert (status, out) == (2, "")
    assert "RAM has 8.00 KiB, and VRAM 12.00 KiB" in err
    assert ran(*tier, "--bytes", "16k", "--scope", "global", "--host-slots", "3")[0] == 2
    assert ran(*tier, "--slots", "2,3", "--host-bytes", "12k")[0] == 0
    assert ran(*tier, "--slots", "2,3", "--host-slots", "3")[0] == 0


def test_what_is_not_known_is_null(ran: Any, tmp_path: Path) -> None:
    layers = (LAYERS[0], TraceLayer(7, 4, 2, None))
    trace_of(tmp_path / "x.trace", [(DECODE, 0, [[0, 1]])], layers)
    for row in rows_of(ran("x.trace", "--slots", 3, "--json")):
        nothing = {"nvme": None, "h2d": None, "d2h": None}
        assert (row["bytes"], row["bytes_per_token"], row["seconds_per_token"]) == (None, nothing, None)
    status, _, err = ran("x.trace", "--bytes", "1G")
    assert (status, "no input knows those of layer 7" in err) == (2, True)
    trace_of(tmp_path / "sizes.trace", [], LAYERS)  # another trace of the model may know
    assert rows_of(ran("x.trace", "sizes.trace", "--bytes", "1G", "--json"))[0]["bytes"] == (5 + 4) * 4096


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
        (["--policy", "lfu"], ["'lfu' is not known", "lfu-ghost", "static-oracle"]),
        (["--policy", "lru,lfu-decay:2"], ["'lfu-decay:2'", "Write lfu-decay:0.98"]),
        (["--policy", "repick:0"], ["'repick:0'", "Write repick:500"]),
        (["--policy", "static"], ["static is a set made of the part before the held-out one", "Give --held-out"]),
        (["--policy", "LRU"], ["'LRU' is not known", "lru, "]),
        (["--policy", ""], ["'' is not known"]),
        (["--policy", "lru,"], ["'' is not known"]),
        (["--policy", "static:"], ["'static:' is not known", "static:PROFILE.json"]),
        (["--scope", "both"], ["--scope"]),
        (["--scope", "global", "--bytes", "8G"], ["no input knows those of layer 0", "Use --slots or --fraction"]),
        (["--host-tier", "inclusive"], ["--host-tier needs a RAM tier", "--host-bytes"]),
        (["--on-miss", "cpu"], ["--on-miss needs a RAM tier"]),
        (["--host-bytes", "8G"], ["needs the bytes of an expert"]),
        (["--held-out", "1"], ["--held-out"]),
        (["--held-out", "0"], ["--held-out"]),
        (["--held-out", "nan"], ["--held-out is not a number between 0 and 1", "found nan"]),
        (["--host-slots", "1", "--host-tier", "inclusive", "--slots", "2"], ["RAM has 1 slots", "VRAM 2", "exclusive"]),
        (["--clock", "demand"], ["--clock prices misses", "--costs"]),
        (["--costs", "gone.json", "--phase", "all"], ["--phase decode"]),
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
    ends = {line.index(" %") for line in lines[3:7]} | {lines[1].index("hit rate") + 6}
    assert len(ends) == 1, "columns stand below each other"
    for line, row in zip(lines[3:7], rows, strict=True):
        slots = str(row["slots_by_layer"]["0"])
        shown = [row["policy"], slots, f"{100 * row['hit_rate']:.1f} %", f"{row['misses'] / 30:.2f}", f"{row['regret']:.2f}"]
        assert all(f" {cell} " in f" {line} " for cell in shown), (shown, line)


def test_rows_are_json_without_a_command() -> None:
    row = Row("lru", "layer", "decode", {0: 1}, 10, 4, 8, Outcome(2, 1, 0, 60), 0.5)
    (got,) = rows_json([row])
    assert list(got) == ROW_KEYS
    assert (got["misses"], got["hit_rate"], got["bytes_per_token"]["nvme"]) == (6, 0.25, 15.0)


EVERY = "lru,random,lfu-forget,lfu-ghost,lfu-decay:0.98,lfuda,slru,arc,s3fifo,repick:4,static-oracle,belady"


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_every_policy_in_both_scopes(ran: Any, tmp_path: Path, scope: str) -> None:
    layers = (TraceLayer(0, 16, 2, 1000), TraceLayer(1, 12, 3, 700))
    write_trace(tmp_path / "x.trace", "chat", [(20, 60)], layers=layers)
    answer = ran("x.trace", "--policy", EVERY, "--fraction", "0,0.5,1", "--scope", scope, "--json")
    rows, got = rows_of(answer), json.loads(answer[1])
    assert [r["policy"] for r in rows] == EVERY.split(",") * 3
    for r in rows:
        assert (r["accesses"], r["hits"] + r["misses"]) == (300, 300)
        assert r["cold_misses"] <= r["misses"]
        assert r["bytes_per_token"]["nvme"] * 60 >= 700 * r["misses"] - 1e-6
        assert (r["uploads"] == 0) or r["policy"] == "repick:4"
        assert r["slots_by_layer"] is None or scope == "layer"
        assert (r["regret"] is None) == (r["bytes"] in (0, 24400)), "with no slots and with all, random is as good as Belady"
    assert {r["hits"] for r in rows[:12]} == {0}
    assert rows[10 + 12]["hits"] > rows[1 + 12]["hits"]
    assert [r["bytes"] for r in rows[::12]] == ([0, 8 * 1000 + 6 * 700, 24400] if scope == "layer" else [0, 12200, 24400])
    assert [(r["misses"], r["cold_misses"]) for r in rows[24 + 10 : 24 + 11]] == [(0, 0)], "all are in the set"
    assert len({(r["misses"], r["cold_misses"]) for r in rows[24:] if r["policy"] != "static-oracle"}) == 1
    for policy, knee in got["knees"].items():
        own = [r for r in rows if r["policy"] == policy]
        enough = [r for r in own if r["hit_rate"] >= 0.9 * max(x["hit_rate"] for x in own)]
        assert knee == {key: min(enough, key=lambda r: r["bytes"])[key] for key in ("slots_by_layer", "bytes", "hit_rate")}
    status, out, _ = ran("x.trace", "--policy", EVERY, "--fraction", "0,0.5,1", "--scope", scope)
    assert status == 0
    lines = out.splitlines()
    assert sum(line.endswith(" knee") for line in lines) == 12
    assert any(line.startswith("knee: ") for line in lines) and any(line.startswith("repick: ") for line in lines)


def test_one_cache_for_all_layers_without_sizes_counts_experts(ran: Any, tmp_path: Path) -> None:
    layers = (TraceLayer(0, 4, 2, None), TraceLayer(1, 6, 2, 5))
    trace_of(tmp_path / "x.trace", [(DECODE, at, [[0, 1]]) for at in (0, 1) * 4], layers)
    answer = ran("x.trace", "--scope", "global", "--policy", "lru", "--slots", "1,2,5", "--json")
    rows = rows_of(answer)
    assert [(r["hits"], r["bytes"], r["slots_by_layer"]) for r in rows] == [(0, None, None), (12, None, None), (12, None, None)]
    assert "one token uses 4 experts: a global LRU below that hits nothing" in answer[2]
    assert "--slots 5 is more than there are: clamped to the 4 experts of layer 0" in answer[2]


@settings(max_examples=40)
@given(st.lists(mixed_calls(), min_size=1, max_size=2), st.sampled_from(sorted(PHASES)), st.integers(0, 5), st.integers(0, 4))
def test_passes_for_all_capacities_agree_with_the_replay(runs: list[Calls], phase: str, a: int, b: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        traces = [read_trace(trace_of(Path(folder, f"{i}"), calls)) for i, calls in enumerate(runs)]
    work = count_work(traces, LAYERS, phase)
    free = Setup(clock=make_clock("blocking", [0.0, 0.0], 1.0))
    wanted = [np.arange(5, 0, -1.0), np.array([0.0, 2.0, 1.0, 0.0])]
    for policy, ranks in ((Policy(LRU), None), (Policy(BELADY), None), (Policy(ORACLE), wanted)):
        fast = outcome(work, policy.cache, ranks, Budget((a, b)), Setup())
        slow = outcome(work, policy.cache, ranks, Budget((a, b)), free)
        parts = [(x.hits, x.cold, x.uploads, x.nvme_bytes) for x in (fast, slow)]
        assert parts[0] == parts[1]
        assert slow.seconds == sum(c.accesses for c in work.counts) - slow.hits, "a second for each miss"


def test_seconds_by_hand(ran: Any, tmp_path: Path) -> None:
    """Two layers of 1 ms; an expert of 1000 bytes takes 1 ms from the disk.  Misses of the steps: 2 and 2, 1 and 0, 0 and 0."""
    layers = (TraceLayer(0, 4, 2, 1000), TraceLayer(1, 4, 2, 1000))
    calls = [([0, 1], [0, 1]), ([0, 2], [0, 1]), ([0, 2], [1, 0])]
    header = TraceHeader("tiny", "qwen3moe", "f1", layers, "chat", has_times=True)
    with TraceWriter(tmp_path / "x.trace", header, sync=False) as writer:
        for step, ids in enumerate(calls):
            for layer, row in enumerate(ids):
                rows = np.array([row], np.uint16)
                writer.append(phase=DECODE, ubatch=step, layer=layer, tokens=np.array([step]), ids=rows, time_ns=1_000_000)
    machine = {"machine": "a test", "memory_bytes_per_s": 1e9, "cpu_expert_seconds": None, "h2d_bytes_per_s": None}
    machine |= {"format": "bel-costs", "version": 1, "block_bytes": 1000, "nvme_bytes_per_s": 1e6, "nvme_depths": {"1": 1e6}}
    costs = {**machine, "d2h_bytes_per_s": None, "layer_seconds": None}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    arguments = ("x.trace", "--policy", "lru,static-oracle", "--slots", "3", "--costs", "costs.json")
    for clock, stall_ms in (("blocking", 5), ("demand", 2), ("arrival", 2 + 1 + 1)):
        lru, oracle = rows_of(ran(*arguments, "--clock", clock, "--json"))
        assert lru["seconds_per_token"] == pytest.approx((6 + stall_ms) * 1e-3 / 3), clock
        assert oracle["seconds_per_token"] == pytest.approx(6e-3 / 3), "all that is used is in the set"
    status, out, err = ran(*arguments)
    assert (status, err) == (0, "")
    assert "ms/token" in out and " 3.33 " in out and "by the clock arrival" in out
    costs["layer_seconds"] = {"0": 0.001}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    status, out, err = ran(*arguments, "--json")
    assert (status, out) == (2, "")
    assert "the costs have none of layer 1" in err
    trace_of(tmp_path / "y.trace", CYCLE, (TraceLayer(0, 4, 2, 9),))
    (tmp_path / "costs.json").write_text(json.dumps({**costs, "layer_seconds": None}))
    assert "the traces have none of layer 0. Record with --timing" in ran("y.trace", "--costs", "costs.json")[2]


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


def test_a_set_for_all_layers_takes_the_most_uses_per_byte() -> None:
    layers = (TraceLayer(0, 2, 1, 10), TraceLayer(1, 2, 1, 4))
    wanted = [np.array([30.0, 9.0]), np.array([8.0, 1.0])]
    assert shared_set(wanted, layers, 14) == [0, 2]
    assert shared_set(wanted, layers, 13) == [0]
    assert shared_set(wanted, layers, 9) == [2, 3], "what does not fit is passed over"
    assert shared_set(wanted, layers, 100) == [0, 2, 1, 3]


def test_the_cache_may_have_a_ram_behind_it(ran: Any, tmp_path: Path) -> None:
    write_trace(tmp_path / "x.trace", "chat", [(20, 60)])
    nothing, some = (
        rows_of(ran("x.trace", "--policy", "lru", "--slots", "4", *more, "--json"))[0]
        for more in ((), ("--host-bytes", "8000"))
    )
    assert some["hits"] == nothing["hits"], "what VRAM holds is the same"
    assert some["bytes_per_token"]["nvme"] < nothing["bytes_per_token"]["nvme"]
    assert some["bytes_per_token"]["h2d"] == nothing["bytes_per_token"]["nvme"]
    modes = [("inclusive", "load", "lru"), ("copy-on-read", "load", "lru"), ("exclusive", "cpu", "static-oracle")]
    for tier, on_miss, policy in modes:
        arguments = ("--policy", policy, "--slots", "4", "--host-bytes", "8k", "--host-tier", tier, "--on-miss", on_miss)
        status, out, err = ran("x.trace", *arguments)
        assert (status, err) == (0, "")
        assert all(word in out for word in ("NVMe", "to VRAM", "to RAM"))
    assert ran("x.trace", "--policy", "lru", "--host-bytes", "8k", "--on-miss", "cpu")[0] == 2


def test_large_calls_are_cut_or_kept(ran: Any, tmp_path: Path) -> None:
    trace_of(tmp_path / "x.trace", [(DECODE, 0, [[0, 1], [2, 3]])] * 4, FOUR)
    arguments = ("x.trace", "--policy", "lru,belady", "--slots", "1", "--json")
    assert [r["hits"] for r in rows_of(ran(*arguments))] == [3, 3]
    assert [r["hits"] for r in rows_of(ran(*arguments, "--oversized", "keep"))] == [12, 12]


def test_knees_are_the_smallest_budgets_that_are_nearly_best() -> None:
    def row(policy: str, slots: int, hits: int, accesses: int = 100) -> Row:
        return Row(policy, "layer", "decode", {0: slots}, None, 10, accesses, Outcome(hits, 0, 0, None), None)

    rows = [row("a", 3, 100), row("a", 2, 90), row("a", 1, 89), row("b", 1, 0), row("b", 2, 0), row("c", 1, 0, 0)]
    assert {name: r.size for name, r in knees(rows).items()} == {"a": 2}, "nothing was hit by b, and of c nothing asked"
    assert knees([row("a", 3, 100), row("a", 3, 90)]) == {}, "one size is no curve"


def test_a_shared_budget_serves_the_layers_in_the_order_of_the_run() -> None:
    """With room for one expert, layer 7 pushes out what layer 3 uses, and is pushed out."""
    with tempfile.TemporaryDirectory() as folder:
        calls: Calls = [(DECODE, 1, [[0]]), (DECODE, 1, [[0]]), (DECODE, 0, [[0]]), (DECODE, 1, [[0]])]
        layers = (TraceLayer(3, 2, 1, 10), TraceLayer(7, 2, 1, 10))
        work: Work = count_work([read_trace(trace_of(Path(folder, "x"), calls, layers))], layers, "decode")
    (row,) = simulate(work, [Policy(LRU)], [SharedBudget(10)], {})
    assert (row.hits, row.misses, row.found.cold, row.found.nvme_bytes) == (1, 3, 2, 30)


def test_the_command_offers_what_there_is() -> None:
    """The command names choices by itself, so that --help need not load the simulator."""
    assert (KINDS, tuple(HOST_TIERS)) == (simulate_cli.CLOCKS, simulate_cli.HOST_TIERS)
