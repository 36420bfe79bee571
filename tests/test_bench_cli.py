"""`bel-run --bench`: the same given tokens for every engine, cold and warm, with figures that add up."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.bundle import open_bundle
from bel.formats.console import run_command
from bel.formats.costs import Costs, encode_costs, load_costs
from bel.formats.gguf_model import open_model
from bel.repack.convert import convert
from bel.repack.layout import plan_layout
from bel.runtime.bench import COLD, BenchResult, Pass, drop_from_cache
from bel.runtime.bench_reads import spread
from bel.runtime.bench_report import load_warning, pass_json, pass_rows
from bel.runtime.cli import main_command
from bel.runtime.context import ContextOptions
from bel.runtime.counters import PhaseCounters
from bel.runtime.engine import Engine
from bel.runtime.machine_load import OtherLoad
from bel.runtime.memory_group import MemoryGroup, memory_group

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "examples" / "tiny-moe-q8_0.gguf"
TEXT = ROOT / "examples" / "prompts" / "code" / "code_01.txt"
FEW = ("--prompt-tokens", "40", "-n", "12", "--threads", "1")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example model as a bundle."""
    source = open_model(MODEL)
    target = tmp_path_factory.mktemp("bench") / "tiny.bel"
    layout = plan_layout(source, "tiny", ple="auto", shard_bytes=45 * 10**9)
    convert(source, layout, target, force=False, check=False, progress=lambda *_: None)
    return target


def bench(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    """What `--bench --json` prints."""
    assert run_command(main_command, "bel-run", ["--bench", "--json", *map(str, arguments)]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def failed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    """Status and message of a run that must fail, and print nothing on stdout."""
    status = run_command(main_command, "bel-run", ["--bench", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert out == ""
    return status, err.splitlines()[-1]


# --- the command ----------------------------------------------------------------------------------------------------


def test_figures_of_a_bundle_add_up(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All that is said of a token's time is that time; the keys are those of any run, and more."""
    answer = bench(capsys, bundle, "-f", TEXT, "--slots", "8", *FEW)
    assert {"text", "tokens", "load", "speed", "cache", "major_faults_per_token", "peak_rss_bytes"} <= answer.keys()
    assert set(answer["load"]["slots_by_layer"].values()) == {8}
    assert [one["name"] for one in answer["passes"]] == ["cold", "warm"]
    assert answer["speed"] == answer["passes"][0]["speed"]
    for one in answer["passes"]:
        parts = [one[f"{part}_ms_per_token"] for part in ("wait", "check", "callback", "compute")]
        assert sum(parts) == pytest.approx(one["ms_per_token"])
        assert sum(one["shares"].values()) == pytest.approx(1)
        assert one["decode_tokens_per_s"] == pytest.approx(one["speed"]["decode_tokens_per_s"])
        assert one["cache"]["accesses"] == 12 * 6 * 4
        assert one["hit_rate"] == one["cache"]["hits"] / one["cache"]["accesses"]
        assert one["read_mb_per_token"] > 0
        assert one["read_alone_ms_per_token"] > 0
    assert answer["peak_rss_bytes"] > 10**7


def test_the_warm_pass_finds_the_slots_filled(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a slot for every expert the first pass reads and the second one does not."""
    cold, warm = bench(capsys, bundle, "-f", TEXT, "--slots", "32", "--no-prefetch", *FEW)["passes"]
    assert cold["cache"]["prompt"]["read_bytes"] > 0
    assert warm["cache"]["prompt"]["read_bytes"] == warm["cache"]["read_bytes"] == 0
    assert warm["hit_rate"] == 1
    assert warm["read_alone_ms_per_token"] is None


def test_stock_decodes_the_same_tokens(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are the text's own and never generated: else engines would do unequal work."""
    ours = bench(capsys, bundle, "-f", TEXT, "--slots", "4", "--cold-only", *FEW)
    stock = bench(capsys, MODEL, "--stock", "-f", TEXT, *FEW)
    with Engine.open().load(MODEL) as model:
        own = model.tokenize(TEXT.read_text(encoding="utf-8"))[40:52].tolist()
    assert ours["tokens"] == stock["tokens"] == own
    assert stock["cache"] is None
    assert stock["passes"][0]["hit_rate"] is None
    assert len(ours["passes"]) == 1


def test_random_tokens_are_a_function_of_the_seed(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fewer tokens are the first of more, so that a slow baseline can be measured on few of them."""
    arguments = (bundle, "--prompt-tokens", "16", "--threads", "1", "--cold-only")
    long, short, other = (
        bench(capsys, *arguments, "-n", n, "--seed", seed)["tokens"] for n, seed in (("9", "3"), ("5", "3"), ("9", "4"))
    )
    assert long[:5] == short
    assert long != other


def test_costs_of_a_run_give_its_time_back(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the clock `blocking`: layers, and each miss at the rate; and what the run did not measure stays."""
    file, made = tmp_path / "costs.json", Costs(2**20, 1e9, ((1, 1e9),), 1e10, 1e-3, None, None, None, "a machine")
    file.write_bytes(encode_costs(made))
    answer = bench(capsys, bundle, "-f", TEXT, "--slots", "8", "--costs", file, *FEW)
    warm, costs = answer["passes"][-1], load_costs(tmp_path / "costs-run.json")
    assert load_costs(file) == made, "what was measured before stays"
    assert costs.layer_seconds is not None
    misses = warm["cache"]["accesses"] - warm["cache"]["hits"]
    stride = open_bundle(bundle).manifest.layers[0].stride_bytes
    clock = sum(seconds for _, seconds in costs.layer_seconds) + misses / 12 * stride / costs.nvme_bytes_per_s
    assert clock * 1e3 == pytest.approx(warm["ms_per_token"])
    assert len(costs.layer_seconds) == 6
    assert replace(costs, layer_seconds=None, nvme_bytes_per_s=1e9, nvme_depths=((1, 1e9),), machine="a machine") == made
    again = bench(capsys, bundle, "-f", TEXT, "--slots", "32", "--costs", tmp_path / "costs-run.json", *FEW)
    assert again["passes"][-1]["hit_rate"] == 1
    kept = load_costs(tmp_path / "costs-run-run.json")
    assert kept.nvme_bytes_per_s == costs.nvme_bytes_per_s, "a run without misses says nothing about them"
    assert kept.machine == costs.machine


def test_costs_need_a_bundle_and_a_file(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before anything is measured."""
    assert failed(capsys, MODEL, "--stock", "--costs", tmp_path / "x", *FEW)[0] == 2
    assert failed(capsys, bundle, "--gpu", "--costs", tmp_path / "x", *FEW)[0] == 2
    status, message = failed(capsys, bundle, "--costs", tmp_path / "x", *FEW)
    assert status == 3
    assert "bel-profile bandwidth" in message


def test_a_text_for_people(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each figure, a column for each pass; what is loaded is said on stderr."""
    assert run_command(main_command, "bel-run", [str(bundle), "--bench", "--slots", "4", *FEW]) == 0
    out, err = capsys.readouterr()
    assert "cold" in out.splitlines()[0]
    assert "warm" in out.splitlines()[0]
    assert "decode, tokens/s, filling of slots included" in out
    assert "4/4/4 of 32" in err
    assert "drawn at random (seed 1)" in err


def test_what_cannot_be_measured_is_refused(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with its exit code, and what would do."""
    short = tmp_path / "short.txt"
    short.write_text("def f():", encoding="utf-8")
    status, message = failed(capsys, bundle, "-f", short, *FEW)
    assert status == 2
    assert "expected 52: a prompt of 40, and 12 to decode" in message
    assert failed(capsys, bundle, "--context", "20", *FEW)[0] == 2
    assert failed(capsys, bundle, "-n", "1")[0] == 2
    assert failed(capsys, tmp_path / "none.bel")[0] == 3
    assert failed(capsys, MODEL, *FEW)[0] == 2  # a GGUF without --stock


def test_a_damaged_bundle_is_damaged_here_too(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is not there must not end as an error of the machine, when its pages are to be dropped."""
    copy = tmp_path / "copy.bel"
    subprocess.run(["cp", "-r", str(bundle), str(copy)], check=True)
    next(copy.glob("*-experts.bin")).unlink()
    status, message = failed(capsys, copy, *FEW)
    assert status == 4
    assert "experts.bin" in message


def test_ctrl_c_ends_a_measurement(bundle: Path) -> None:
    """A signal in the middle of a decode must not end as an error of the model: nothing of its results was wrong."""
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from bel.runtime.cli import main; main()"
    command = [sys.executable, "-c", code, str(bundle), "--bench", "--slots", "4", "--threads", "1", "-n", "20000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "to decode" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "bel-run: error: interrupted before all was measured"


# --- figures ----------------------------------------------------------------------------------------------------------


def made_pass(seconds: list[float], phase: PhaseCounters | None, alone: float | None) -> Pass:
    """A pass with a prompt of ten tokens in two seconds, and a major fault in its first decoded token."""
    faults = np.eye(1, len(seconds), dtype=np.int64)[0]
    return Pass(COLD, 10, 2.0, 0, np.array(seconds), faults, None if phase is None else PhaseCounters(), phase, alone)


def test_figures_are_exact() -> None:
    """Four tokens of 4, 2, 1 and 1 seconds."""
    phase = PhaseCounters(
        accesses=40, missed=10, read_bytes=8_000_000, wait_ns=2 * 10**9, check_ns=10**9, callback_ns=4 * 10**9
    )
    found = pass_json(made_pass([4, 2, 1, 1], phase, 2.5))
    assert found["prompt_tokens_per_s"] == 5
    assert found["decode_tokens_per_s"] == 0.5
    assert found["median_tokens_per_s"] == pytest.approx(1 / 1.5)
    assert found["last_half_tokens_per_s"] == 1
    assert (found["major_faults_per_token"], found["last_half_major_faults_per_token"]) == (0.25, 0)
    assert (found["hit_rate"], found["read_mb_per_token"]) == (0.75, 2)
    assert found["shares"] == {"compute": 0.5, "callback": 0.125, "reads": 0.25, "checksums": 0.125}
    assert found["hidden_ratio"] == pytest.approx(0.2)
    assert found["read_alone_ms_per_token"] == 625


def test_what_no_pass_has_is_left_out() -> None:
    """A stock run shows no line of the slots."""
    stock = pass_json(made_pass([1, 1], None, None))
    ours = pass_json(made_pass([1, 1], PhaseCounters(accesses=1), None))
    assert not any("experts" in label for label, *_ in pass_rows([stock]))
    line = next(row for row in pass_rows([stock, ours]) if "experts" in row[0])
    assert line[1:] == ("-", "100.0%")


@pytest.mark.parametrize(("cores", "is_said"), [(0.0, False), (0.2, False), (1.3, True)])
def test_a_loaded_machine_is_said(cores: float, is_said: bool) -> None:
    """A figure of a busy machine is no figure."""
    result = BenchResult((), np.zeros(0, np.int64), 1.0, 2, 0.5, cores, 10**8, None)
    assert (load_warning(result) is not None) == is_said


@given(count=st.integers(0, 200), parts=st.integers(1, 64))
def test_reads_are_spread_evenly(count: int, parts: int) -> None:
    """All of them, and no layer has two more than another."""
    shares = spread(count, parts)
    assert sum(shares) == count
    assert len(shares) == parts
    assert max(shares) - min(shares) <= 1


# --- the machine ------------------------------------------------------------------------------------------------------


def test_the_work_of_others_is_seen() -> None:
    """A process that computes is other work until it has ended."""
    others = OtherLoad()
    code = "import time\nend = time.monotonic() + 1\nwhile time.monotonic() < end: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as busy:
        while busy.poll() is None and others.cores() < 0.2:
            pass
        assert busy.returncode is None
        busy.wait()


@pytest.mark.parametrize("line", ["0::/a/b\n", "9:cpu,memory:/a/b\n0::/\n"])
def test_the_innermost_limit_counts(tmp_path: Path, line: str) -> None:
    """`b` has no limit of its own, `a` has one: of either version of control groups."""
    is_v2 = line.startswith("0::")
    limit, peak = ("memory.max", "memory.peak") if is_v2 else ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
    groups = tmp_path / "groups"
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(line, encoding="ascii")
    inner = groups / ("a/b" if is_v2 else "memory/a/b")
    inner.mkdir(parents=True)
    assert memory_group(tmp_path, groups) is None
    (inner / limit).write_text("max\n" if is_v2 else "9223372036854771712\n", encoding="ascii")
    assert memory_group(tmp_path, groups) is None
    (inner.parent / limit).write_text("1000\n", encoding="ascii")
    assert memory_group(tmp_path, groups) == MemoryGroup(1000, None)
    (inner.parent / peak).write_text("900\n", encoding="ascii")
    assert memory_group(tmp_path, groups) == MemoryGroup(1000, 900)


# --- what the benchmark stands on -------------------------------------------------------------------------------------


@pytest.fixture
def bench_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs of tests/bench can be imported."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "bench"))


@pytest.mark.usefixtures("bench_folder")
def test_cold_is_cold(tmp_path: Path) -> None:
    """A file that was read has left the page cache."""
    measure = importlib.import_module("measure")
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    path.read_bytes()
    assert measure.cached_share(path) == 1
    if importlib.import_module("machine").file_system(tmp_path)[0] == "tmpfs":
        pytest.skip("a file in memory cannot leave it")
    drop_from_cache([path])
    assert measure.cached_share(path) == 0


@pytest.mark.usefixtures("bench_folder")
@settings(max_examples=3)
@given(factor=st.integers(2, 4))
def test_an_inflated_model_says_the_same(tmp_path_factory: pytest.TempPathFactory, factor: int) -> None:
    """It is several times as large, and each token has the same experts and the same successor."""
    inflate = importlib.import_module("inflate")
    path = tmp_path_factory.mktemp("inflated") / "big.gguf"
    stacks = sum(t.size_bytes for t in open_model(MODEL).tensors if t.name.endswith("_exps.weight"))
    assert inflate.inflate(MODEL, path, factor * stacks) == factor
    assert path.stat().st_size > factor * stacks
    assert greedy(path) == greedy(MODEL)


def greedy(path: Path) -> list[int]:
    """Twenty tokens behind a beginning."""
    with Engine.open().load(path) as model, model.context(ContextOptions(64, 32, 32, 1)) as context:
        context.decode(model.tokenize("def add(a, b):\n"))
        tokens = []
        for _ in range(20):
            tokens.append(int(np.argmax(context.logits[-1])))
            context.decode(tokens[-1:])
    return tokens
