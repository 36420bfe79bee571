"""`bel-run --gpu` with llama.cpp's own cache as a user meets it: stock's text, what is reported, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bel.formats.console import run_command
from bel.runtime import gpu_running
from bel.runtime.cli import NAME, main_command
from bel.runtime.devices import devices
from bel.runtime.engine import Engine
from bel.runtime.generate import Speed
from bel.runtime.gpu_report import own_cache_json
from bel.runtime.pool_home import Home, cpu_home
from bel.runtime.stock_cache import CacheCounts
from cpu_as_gpu import pinned_home, speeds
from cpu_as_gpu import without_cache as without_cache
from trained import FEW, TINY
from trained import tiny as tiny


def as_gpu(monkeypatch: pytest.MonkeyPatch, home: Home) -> None:
    """The first GPU is the CPU."""
    monkeypatch.setattr(gpu_running, "find_gpu", lambda _engine, _number: devices(Engine.open())[0])
    monkeypatch.setattr(gpu_running, "device_home", lambda _engine, _address: home)


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = run_command(main_command, NAME, [str(x) for x in arguments])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.usefixtures("without_cache")
@pytest.mark.parametrize("way", ["cache", "auto"])
def test_the_command_writes_what_stock_writes(
    way: str, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generation goes on in the context of the way that was taken."""
    _, out, _ = run_cli(capsys, TINY, "--stock", *FEW, "--json")
    expected = json.loads(out)["tokens"]
    as_gpu(monkeypatch, pinned_home())
    speeds(monkeypatch, {"upload": 0.003, "split": 0.002, "cache": 0.001})
    status, out, err = run_cli(capsys, tiny, "--gpu", way, "--slots", "8", *FEW, "--json")
    assert status == 0, err
    answer = json.loads(out)
    assert answer["tokens"] == expected
    load = answer["load"]
    assert (load["asked"], load["way"], load["policy"], load["left_out"]) == (way, "cache", "lru", {})
    assert [x["way"] for x in load["tried"]] == (["cache", "split", "upload"] if way == "auto" else [])
    assert load["memory"]["host_is_pinned"]
    assert answer["cache"] is None, "there was none to count"
    assert "llama.cpp's own cache" in err


@pytest.mark.usefixtures("without_cache")
@pytest.mark.parametrize("way", ["cache", "auto"])
def test_its_speed_is_measured(
    way: str, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a context too small for a whole trial."""
    as_gpu(monkeypatch, pinned_home())
    numbers = ("--prompt-tokens", "16", "-n", "8", "--threads", "1")
    status, out, err = run_cli(capsys, tiny, "--bench", "--gpu", way, "--slots", "8", *numbers, "--json")
    assert status == 0, err
    answer = json.loads(out)
    assert [one["name"] for one in answer["passes"]] == ["cold", "warm"]
    assert all(one["decode_tokens_per_s"] > 0 for one in answer["passes"])


def test_the_command_says_what_cannot_be(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its exit code too: the machine's fault is 5, the user's 2."""
    as_gpu(monkeypatch, cpu_home(Engine.open()))
    status, _, err = run_cli(capsys, tiny, "--gpu", "cache", "--slots", "8", *FEW)
    assert (status, "not in pinned memory" in err) == (5, True), err
    as_gpu(monkeypatch, pinned_home())
    status, _, err = run_cli(capsys, tiny, "--gpu", "cache", "--slots", "8", *FEW)
    assert (status, "MoE cache requires a GPU backend" in err) == (5, True), err
    monkeypatch.setattr(gpu_running, "rss_bytes", lambda: 0)
    ram = str(gpu_running.HOST_MARGIN_BYTES + (4 << 20))
    status, _, err = run_cli(capsys, tiny, "--gpu", "cache", "--slots", "8", "--ram", ram, *FEW)
    assert (status, "needs all experts in host memory" in err) == (2, True), err


def test_counts_of_llama_cpp_are_reported() -> None:
    """Batches of up to 8 tokens as decode, of 9 to 32 as prompt; what it does not tell is None."""
    counts = CacheCounts(2362, 1494, 82_600_000, 22, 279, 15_400_000, 17)
    answer = own_cache_json(counts, Speed(20, 1.0, 40, 2.0))
    assert (answer["accesses"], answer["hits"], answer["misses"]) == (3856, 2362, 1494)
    assert answer["hit_rate"] == pytest.approx(0.6126, abs=1e-4)
    assert answer["bytes_per_token"] == {"h2d": 82_600_000 / 40}
    assert (answer["prompt"]["hits"], answer["prompt"]["bytes_per_token"]["h2d"]) == (22, 770_000)
    assert answer["wait_seconds"] is answer["from_nvme"] is None
    assert own_cache_json(CacheCounts(), Speed())["hit_rate"] is None
