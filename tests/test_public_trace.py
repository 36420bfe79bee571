"""The public trace: what our simulator says of it is what its authors' own replay says.

Their rules, and which reading of them gives their figures to the last digit:

- each distinct expert of a call is looked up and counted once; LFU counts calls, not rows, and keeps its counts;
- of equal counts, and of experts that are never used again, the one used longest ago goes first, across all layers;
- a call larger than the cache stays whole until the next one has been looked up (`--oversized keep`);
- with a share for each layer that share is rounded down to bytes, and slots are what fits into it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bel.formats.console import run_command
from bel.formats.trace_calls import read_trace
from bel.formats.units import MIB
from bel.profiler.cli import NAME, main_group
from bel.profiler.outcomes import Setup
from bel.profiler.simulate import Policy, simulate
from bel.profiler.slot_budgets import BYTES, read_budgets, read_shared_budgets
from bel.profiler.work import Work, count_work
from public_trace import READ_BYTES, Published, import_public_trace, published

TOLERANCE_POINTS = 0.1  # the bar; the differences are below 0.001
TOLERANCE_MIB = 0.1
OURS = {"lru": "lru", "lfu": "lfu-ghost", "belady": "belady", "layer": "lru", "layerlfu": "lfu-ghost"}
GLOBAL = ("lru", "lfu", "belady")
BUDGETS_MIB = [250, 500, 750, 1000, 1500, 2000, 2500, 3000, 4000, 6000, 8000]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return import_public_trace(tmp_path_factory.mktemp("public"))


@pytest.fixture(scope="module")
def works(trace: Path) -> dict[str, Work]:
    public = read_trace(trace)
    return {phase: count_work([public], public.header.layers, phase) for phase in ("decode", "all")}


def test_the_table_is_whole() -> None:
    assert sorted({(row.budget_bytes // MIB) for row in published()}) == BUDGETS_MIB
    assert len(published()) == 6 * len(BUDGETS_MIB), "the sixth policy is their random, whose draws are not ours"


@pytest.mark.parametrize("policy", OURS)
def test_hit_rates_and_reads_are_the_published_ones(works: dict[str, Work], policy: str) -> None:
    rows = [row for row in published() if row.policy == policy]
    read = read_shared_budgets if policy in GLOBAL else read_budgets
    got = {}
    for phase, work in works.items():
        budgets = read(BYTES, ",".join(str(row.budget_bytes) for row in rows), work.layers)
        got[phase] = simulate(work, [Policy(OURS[policy])], budgets, {}, Setup(keep_whole=True))
    for want, decode, both in zip(rows, got["decode"], got["all"], strict=True):
        assert abs(100 * (decode.hit_rate or 0) - want.decode_hit_percent) < TOLERANCE_POINTS, want
        assert abs(100 * (both.hit_rate or 0) - want.hit_percent) < TOLERANCE_POINTS, want
        assert abs((both.found.nvme_bytes or 0) / MIB - want.read_mib) < TOLERANCE_MIB, want


@pytest.mark.parametrize(("scope", "names"), [("global", GLOBAL), ("layer", ("layer", "layerlfu"))])
def test_the_command_says_so_too(trace: Path, capsys: pytest.CaptureFixture[str], scope: str, names: tuple[str, ...]) -> None:
    policies = ",".join(OURS[name] for name in names)
    command = ["simulate", str(trace), "--policy", policies, "--bytes", "2000M", "--scope", scope, "--oversized", "keep"]
    assert run_command(main_group, NAME, [*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    wanted: list[Published] = [next(x for x in published() if (x.budget_bytes, x.policy) == (2000 * MIB, n)) for n in names]
    for row, want in zip(rows, wanted, strict=True):
        assert (row["scope"], row["accesses"]) == (scope, 128 * 48 * 6)
        assert abs(100 * row["hit_rate"] - want.decode_hit_percent) < TOLERANCE_POINTS


@pytest.mark.parametrize("host", READ_BYTES)
def test_three_tiers_through_the_command(trace: Path, capsys: pytest.CaptureFixture[str], host: str) -> None:
    command = ["simulate", str(trace), "--policy", "lru", "--slots", "24", "--host-slots", "24", "--host-tier", host, "--json"]
    assert run_command(main_group, NAME, command) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["bytes_per_token"]["nvme"] * 128 == READ_BYTES[host]
    assert row["hits"] + row["host_hits"] < row["accesses"] == 128 * 48 * 6


def test_a_global_lru_below_a_token_cycle_hits_nothing_and_is_told(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run_command(
            main_group, NAME, ["simulate", str(trace), "--policy", "lru", "--scope", "global", "--bytes", "700M", "--json"]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert json.loads(out)["rows"][0]["hits"] == 0
    assert "a global LRU below that hits nothing" in err
