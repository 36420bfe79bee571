"""`bel-run --gpu`: what is refused and how, and whole runs with the CPU in the part of the GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bel.formats.bundle import open_bundle
from bel.formats.console import run_command
from bel.formats.plan_json import load_plan
from bel.profiler.cli import main_group as profile
from bel.runtime import gpu_running
from bel.runtime.cli import NAME, main_command
from bel.runtime.devices import devices
from bel.runtime.engine import Engine
from bel.runtime.gpu_choice import Way, choose
from bel.runtime.pool_home import cpu_home
from faults import HANG_SECONDS
from trained import FEW, PROMPT, TINY
from trained import tiny as tiny

COMMAND = Path(sys.executable).parent / "bel-run"


@pytest.fixture(scope="module")
def plan(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the experts in slots."""
    folder = tmp_path_factory.mktemp("plan")
    recorded = ["record", str(TINY), "-p", PROMPT, "-n", "24", "--threads", "1", "-o", str(folder / "code.json")]
    assert run_command(profile, "bel-profile", recorded) == 0
    planned = ["plan", str(folder / "code.trace"), "--model", str(tiny), "--slots-bytes", "2688k", "--objective", "misses"]
    assert run_command(profile, "bel-profile", [*planned, "-o", str(folder / "plan.json")]) == 0
    return folder / "plan.json"


@pytest.fixture
def cpu_is_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first GPU is the CPU."""
    engine = Engine.open()
    monkeypatch.setattr(gpu_running, "find_gpu", lambda _engine, _number: devices(engine)[0])
    monkeypatch.setattr(gpu_running, "device_home", lambda _engine, _address: cpu_home(engine))


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = run_command(main_command, NAME, [str(x) for x in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def answered(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    status, out, err = run(capsys, *arguments, "--json")
    assert status == 0, err
    answer: dict[str, Any] = json.loads(out)
    return answer


@pytest.fixture(scope="module")
def stock() -> list[int]:
    """What stock llama.cpp writes."""
    command = [COMMAND, TINY, "--stock", *FEW, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    tokens: list[int] = json.loads(done.stdout)["tokens"]
    return tokens


# --- with the CPU in the part of the GPU ------------------------------------------------------------------------------


@pytest.mark.usefixtures("cpu_is_gpu")
@pytest.mark.parametrize("way", ["upload", "split", "auto"])
def test_every_way_writes_what_stock_writes(way: str, tiny: Path, stock: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    """With fewer slots than experts, and counts that add up."""
    answer = answered(capsys, tiny, "--gpu", way, "--slots", "8", *FEW)
    assert answer["tokens"] == stock
    load, cache = answer["load"], answer["cache"]
    assert (load["asked"], set(load["slots_by_layer"].values())) == (way, {8})
    assert load["way"] in ("upload", "split")
    assert cache["accesses"] == 11 * 6 * 4
    assert 0 < cache["misses"] < cache["accesses"]
    assert cache["hits"] + cache["misses"] == cache["accesses"]
    assert cache["prompt"]["accesses"] > 0
    assert cache["bytes_per_token"]["h2d"] > 0
    assert (cache["on_cpu"] > 0) <= (load["way"] != "upload")
    seconds = [x["seconds_per_token"] for x in load["tried"]]
    assert seconds == sorted(seconds)
    assert len(load["tried"]) == (2 if way == "auto" else 0)


@pytest.mark.usefixtures("cpu_is_gpu")
def test_a_plan_gives_slots_and_the_fixed_set(
    tiny: Path, plan: Path, stock: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its experts are there before the first token, and stay; what is missing the CPU computes."""
    answer = answered(capsys, tiny, "--gpu", "static", "--plan", plan, *FEW)
    assert answer["tokens"] == stock
    assert answer["load"]["slots_by_layer"] == {str(x.layer): x.slots for x in load_plan(plan).layers}
    assert answer["cache"]["on_cpu"] == answer["cache"]["misses"]
    assert answer["cache"]["bytes_per_token"]["h2d"] == 0
    auto = answered(capsys, tiny, "--gpu", "auto", "--plan", plan, *FEW)
    assert {x["way"] for x in auto["load"]["tried"]} == {"upload", "split", "static"}
    tried = [Way(x["way"], x["policy"], x["seconds_per_token"]) for x in auto["load"]["tried"]]
    assert auto["load"]["way"] == choose(tried).mode


@pytest.mark.usefixtures("cpu_is_gpu")
def test_people_are_told_what_was_chosen_and_why(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, tiny, "--gpu", "auto", "--slots", "8", "--stats", *FEW)
    assert status == 0
    for words in ("slots per layer (min/median/max) 8/8/8 of 32", "for a layer's stage", "on the first tokens of the prompt"):
        assert words in err
    assert "on the GPU (" in err
    assert run(capsys, tiny, "--gpu", "upload", "--slots", "8", *FEW)[2].count("way upload: asked for") == 1


@pytest.mark.usefixtures("cpu_is_gpu")
def test_speed_is_measured_with_a_gpu_too(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ("--prompt-tokens", "16", "-n", "8", "--threads", "1")
    answer = answered(capsys, tiny, "--bench", "--gpu", "auto", "--slots", "8", *numbers)
    for one in answer["passes"]:
        assert one["decode_tokens_per_s"] > 0
        assert one["cache"]["accesses"] == 8 * 6 * 4, "a trial before it does not count"


# --- what is refused --------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so(tiny: Path) -> None:
    """Exit 5, whatever is asked of the GPU; and the message says what there is and how to get more."""
    for arguments in ([tiny, "--gpu", "auto"], [TINY, "--stock", "--gpu", "all"]):
        command = [COMMAND, *arguments, "-p", "hi"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
        assert done.returncode == 5, done.stderr
        assert "there is no GPU that this llama.cpp can use" in done.stderr
        assert "docs/gpu.md" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--vram", "4G"), "--gpu is not given"),
        (("--gpu", "auto", "--slots", "8", "--vram", "4G"), "exclude each other"),
        (("--gpu", "cpu-moe"), "--gpu cpu-moe is a way of stock llama.cpp"),
        (("--gpu", "static"), "there is no plan"),
        (("--gpu", "upload", "--policy", "static"), "does not go with --gpu upload"),
        (("--gpu", "static", "--plan", "PLAN", "--policy", "lru"), "--policy lru does not go with it"),
        (("--gpu", "fast"), "'fast' is no way to use a GPU"),
        (("--gpu", "1234"), "a GPU's number below 1000"),
    ],
)
def test_what_does_not_go_together(
    arguments: tuple[str, ...], words: str, tiny: Path, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, tiny, "-p", "hi", *(plan if x == "PLAN" else x for x in arguments))
    assert status == 2, err
    assert words in err


def test_stock_ways_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (("--gpu", "split"), "--stock has no way 'split'"),
        (("--gpu", "auto"), "stock llama.cpp does not choose a way to use a GPU; expected --gpu all, cpu-moe, cache"),
        (("--gpu", "0"), "stock llama.cpp does not choose a way"),
        (("--gpu", "cache"), "needs its size. Give --vram SIZE"),
        (("--gpu", "all", "--vram", "1G"), "has no cache of experts"),
        (("--gpu", "all", "--policy", "lru"), "--policy is for a bundle"),
        (("--policy", "lru"), "--policy is for a bundle"),
    ):
        status, _, err = run(capsys, TINY, "--stock", "-p", "hi", *arguments)
        assert status == 2
        assert words in err


def test_nobody_looks_into_a_compiled_run(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, tiny, "--gpu", "auto", "--check-against", TINY, "-p", "hi", "-n", "1")
    assert status == 2
    assert "machine code" in err


@pytest.mark.usefixtures("cpu_is_gpu")
@pytest.mark.parametrize("way", ["auto", "upload"])
def test_what_ram_does_not_hold_is_on_disk(
    way: str, tiny: Path, stock: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three places, each expert in one of them, and the words of stock llama.cpp."""
    monkeypatch.setattr(gpu_running, "rss_bytes", lambda: 0)
    manifest = open_bundle(tiny).manifest
    stride = manifest.layers[0].stride_bytes
    promise = manifest.dense.size_bytes + gpu_running.HOST_MARGIN_BYTES + 60 * stride
    asked = (tiny, "--gpu", way, "--slots", "6", "--ram", str(promise), *FEW)
    answer = answered(capsys, *asked)
    assert answer["tokens"] == stock
    load, cache = answer["load"], answer["cache"]
    assert load["way"] == "upload"
    assert load["host_tier"]["kind"] == "exclusive"
    assert 0 < max(load["host_tier"]["slots"]) < 26
    assert load["memory"]["host_bytes"] <= 60 * stride
    assert cache["from_ram"] + cache["from_nvme"] == cache["misses"] > 0
    assert cache["bytes_per_token"]["nvme"] > 0
    status, _, err = run(capsys, *asked, "--stats")
    assert status == 0
    assert "from RAM" in err
    assert "that have no slot (exclusive" in err
    assert ("the only one where host memory does not hold all experts" in err) == (way == "auto")


@pytest.mark.usefixtures("cpu_is_gpu")
def test_too_little_host_memory_is_refused(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a way that needs all experts there says so."""
    status, _, err = run(capsys, tiny, "--gpu", "upload", "--slots", "8", "--ram", "32M", "-p", "hi")
    assert status == 2
    assert "leave nothing for experts" in err


@pytest.mark.usefixtures("cpu_is_gpu")
def test_the_cpu_computes_only_from_a_memory_that_holds_all(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_running, "rss_bytes", lambda: 0)
    ram = str(gpu_running.HOST_MARGIN_BYTES + (4 << 20))
    status, _, err = run(capsys, tiny, "--gpu", "split", "--slots", "8", "--ram", ram, "-p", "hi")
    assert status == 2
    assert "needs all experts in host memory" in err


def test_a_run_without_a_gpu_imports_nothing_for_one(tiny: Path) -> None:
    """A user of the CPU alone needs no compiler, and pays for none."""
    code = (
        "import sys; from bel.runtime.compiled import stay_plain; stay_plain();"
        "from bel.formats.console import run_command; from bel.runtime.cli import main_command;"
        f"status = run_command(main_command, 'bel-run', [{str(tiny)!r}, '-p', 'hi', '-n', '2', '--threads', '1']);"
        "print(status, sorted(n for n in sys.modules if n == 'numba' or n.startswith('bel.runtime.pool') or 'gpu_' in n))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    assert done.stdout.endswith("0 []\n"), (done.stdout, done.stderr)
