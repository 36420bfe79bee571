"""`bel-profile simulate` as a user meets it: what it counts, what it does not know, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bel.formats.trace import DECODE, PROMPT, TraceWriter
from bel.formats.trace_header import TraceHeader, TraceLayer
from bel.profiler import simulate_cli
from bel.profiler.clock import KINDS
from bel.profiler.tier_caches import HOST_TIERS
from routes import write_trace
from simulated import CYCLE, FOUR, LAYERS, PHASES, ROW_KEYS, counts_profile, rows_of, simulate_in, steps, trace_of


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return simulate_in(tmp_path, capsys, monkeypatch)


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


def test_the_command_offers_what_there_is() -> None:
    """The command names choices by itself, so that --help need not load the simulator."""
    assert (KINDS, tuple(HOST_TIERS)) == (simulate_cli.CLOCKS, simulate_cli.HOST_TIERS)
