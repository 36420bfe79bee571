"""Sizes that `bel-profile simulate` is asked for: slots, fractions and bytes, and what they come to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bel.formats.trace import DECODE
from bel.formats.trace_header import TraceLayer
from simulated import rows_of, simulate_in, trace_of


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return simulate_in(tmp_path, capsys, monkeypatch)


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


def test_one_cache_for_all_layers_without_sizes_counts_experts(ran: Any, tmp_path: Path) -> None:
    layers = (TraceLayer(0, 4, 2, None), TraceLayer(1, 6, 2, 5))
    trace_of(tmp_path / "x.trace", [(DECODE, at, [[0, 1]]) for at in (0, 1) * 4], layers)
    answer = ran("x.trace", "--scope", "global", "--policy", "lru", "--slots", "1,2,5", "--json")
    rows = rows_of(answer)
    assert [(r["hits"], r["bytes"], r["slots_by_layer"]) for r in rows] == [(0, None, None), (12, None, None), (12, None, None)]
    assert "one token uses 4 experts: a global LRU below that hits nothing" in answer[2]
    assert "--slots 5 is more than there are: clamped to the 4 experts of layer 0" in answer[2]
