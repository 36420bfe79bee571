"""What three tiers cost in time: by hand, equal to one tier where RAM is empty, and what the command refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bel.formats.console import run_command
from bel.formats.costs import Costs, encode_costs
from bel.formats.trace import DECODE, TraceWriter
from bel.formats.trace_calls import read_trace
from bel.formats.trace_header import TraceHeader, TraceLayer
from bel.profiler.cli import NAME, main_group
from bel.profiler.clock import KINDS, make_clock
from bel.profiler.outcomes import Setup
from bel.profiler.simulate import parse_policies, simulate
from bel.profiler.slot_budgets import Budget, SharedBudget
from bel.profiler.tier_caches import HOST_TIERS, Room
from bel.profiler.work import count_work
from routes import write_trace

ONE = (TraceLayer(0, 4, 1, 1000),)
EVERY = "lru,random,lfu-forget,lfu-ghost,lfu-decay:0.98,lfuda,slru,arc,s3fifo,repick:4,static-oracle,belady"


def one_a_step(path: Path, experts: Sequence[int]) -> None:
    with TraceWriter(path, TraceHeader("tiny", "qwen3moe", "f1", ONE, "chat"), sync=False) as writer:
        for step, e in enumerate(experts):
            ids = np.array([[e]], np.uint16)
            writer.append(phase=DECODE, ubatch=step, layer=0, tokens=np.array([step]), ids=ids)


def costs(**changes: Any) -> None:
    """An expert of 1000 bytes takes 1 ms from NVMe, 0.25 ms from RAM and 3 ms on the CPU; a layer takes 1 ms."""
    known: dict[str, Any] = {"nvme_bytes_per_s": 1e6, "h2d_bytes_per_s": 4e6, "cpu_expert_seconds": 3e-3, **changes}
    seconds = ((0, 1e-3),)
    fixed = {"block_bytes": 1000, "nvme_depths": (), "memory_bytes_per_s": 1e9, "d2h_bytes_per_s": None, "machine": "a test"}
    Path("costs.json").write_bytes(encode_costs(Costs(layer_seconds=seconds, **fixed, **known)))


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `simulate` of a trace `x.trace` with the costs, in a folder of its own: exit status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    costs()

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        command = ["simulate", "x.trace", "--costs", "costs.json", *map(str, arguments)]
        return (run_command(main_group, NAME, command), *capsys.readouterr())

    return run


def row_of(answer: tuple[int, str, str]) -> dict[str, Any]:
    status, out, err = answer
    assert status == 0, err
    (row,) = json.loads(out)["rows"]
    return dict(row)


def test_what_ram_has_takes_the_link_to_vram_alone(ran: Any) -> None:
    """One slot in each tier: 0 and 1 and 2 come from NVMe, then 0 from RAM, twice."""
    one_a_step(Path("x.trace"), [0, 1, 0, 2, 0])
    tiers = ("--policy", "lru", "--slots", "1", "--host-slots", "1", "--json")
    for clock, stall_ms in (("blocking", 3.5), ("arrival", 3.5), ("demand", 0)):
        row = row_of(ran(*tiers, "--clock", clock))
        assert row["seconds_per_token"] == pytest.approx((5 + stall_ms) * 1e-3 / 5), clock
    assert [row[k] for k in ("hits", "misses", "host_hits", "on_cpu", "uploads")] == [0, 5, 2, 0, 0]
    assert row["bytes_per_token"] == {"nvme": 600, "h2d": 1000, "d2h": 800}
    costs(nvme_bytes_per_s=1e9, h2d_bytes_per_s=1e6)  # the slower of the two links counts
    assert row_of(ran(*tiers, "--clock", "blocking"))["seconds_per_token"] == pytest.approx(2e-3)


def test_experts_on_the_cpu_run_beside_the_layer_and_load_nothing(ran: Any) -> None:
    """The set is {0}: 1 is read, then found in RAM, and takes 3 ms each time."""
    one_a_step(Path("x.trace"), [0, 1, 0, 1, 0])
    cpu = ("--policy", "static-oracle", "--slots", "1", "--host-slots", "1", "--on-miss", "cpu", "--clock", "blocking")
    row = row_of(ran(*cpu, "--json"))
    assert row["seconds_per_token"] == pytest.approx((3 * 1 + 2 * 3 + 1) * 1e-3 / 5)
    assert [row[k] for k in ("hits", "misses", "host_hits", "on_cpu")] == [3, 2, 1, 2]
    assert row["bytes_per_token"] == {"nvme": 200, "h2d": 0, "d2h": 0}
    out = ran(*cpu)[1]
    assert all(words in out for words in ("in RAM", "CPU/token", "20.0 %", "what the CPU computes runs beside the layer"))


@pytest.mark.parametrize("kind", KINDS)
def test_without_ram_three_tiers_cost_what_one_does(tmp_path: Path, kind: str) -> None:
    """For every policy, uploads of repick and all."""
    layers = (TraceLayer(0, 16, 2, 1000), TraceLayer(1, 12, 3, 700))
    trace = read_trace(write_trace(tmp_path / "x.trace", "chat", [(20, 60)], layers=layers))
    work = count_work([trace], layers, "decode")
    clock = make_clock(kind, [1e-3, 2e-3], [4e-4, 3e-4], 0.0, [1e-4, 2e-4])
    for budgets in ([Budget((5, 4)), Budget((9, 0))], [SharedBudget(7000)]):
        one = simulate(work, parse_policies(EVERY), budgets, {}, Setup(clock=clock))
        for tier in HOST_TIERS:
            setup = Setup(clock=clock, host=Room(slots=(0, 0)), host_tier=tier)
            for got, want in zip(simulate(work, parse_policies(EVERY), budgets, {}, setup), one, strict=True):
                assert got.found.seconds == pytest.approx(want.found.seconds), got.policy
                for name in ("hits", "cold", "uploads", "nvme_bytes"):
                    assert getattr(got.found, name) == getattr(want.found, name), (got.policy, name)
                assert (got.found.host_hits, want.found.host_hits) == (0, None)
    assert any(row.found.uploads for row in one)


def test_more_ram_is_never_slower_where_nothing_hides(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "x.trace", "chat", [(20, 60)]))
    work = count_work([trace], trace.header.layers, "decode")
    clock = make_clock("blocking", [1e-3, 1e-3], 1e-3, 0.0, 2e-4)
    seconds = [
        simulate(work, parse_policies("lru"), [Budget((4, 4))], {}, Setup(clock=clock, host=Room(slots=(n, n))))[0]
        for n in range(0, 17, 4)
    ]
    times = [row.found.seconds or 0.0 for row in seconds]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]


def test_what_is_missing_is_named(ran: Any) -> None:
    one_a_step(Path("x.trace"), [0, 1, 0])
    tiers = ("--slots", "1", "--host-slots", "1", "--policy", "static-oracle")
    costs(h2d_bytes_per_s=None)
    status, out, err = ran(*tiers)
    assert (status, out) == (2, "")
    assert "h2d_bytes_per_s, the rate from host to device, and the costs have none" in err
    costs(cpu_expert_seconds=None)
    assert ran(*tiers)[0] == 0, "nothing is computed on the CPU"
    status, out, err = ran(*tiers, "--on-miss", "cpu")
    assert (status, out) == (2, "")
    assert "cpu_expert_seconds" in err


def test_slots_of_ram_are_refused_or_clamped(ran: Any) -> None:
    one_a_step(Path("x.trace"), [0, 1, 0])
    assert "exclude each other" in ran("--host-slots", "1", "--host-bytes", "1k")[2]
    assert ran("--host-slots", "-1")[0] == 2
    assert ran("--host-slots", "1,2")[0] == 2
    status, out, err = ran("--policy", "lru", "--slots", "1", "--host-slots", "9", "--json")
    assert (status, json.loads(out)["rows"][0]["host_hits"]) == (0, 1)
    assert "--host-slots 9 is more than there are: clamped to the 4 experts of layer 0" in err
