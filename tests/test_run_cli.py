"""`bel-run` as people use it: the real command on a converted model, its streams, exit codes, and what it says of faults."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

import archs
from bel.formats.bundle import Bundle, open_bundle
from bel.formats.console import run_command
from bel.formats.fingerprint import fingerprint
from bel.formats.plan import COLUMNS, MISSES, Plan, PlanLayer, PlanWork, Prediction
from bel.formats.plan_json import encode_plan
from bel.repack.cli import main_group as repack
from bel.runtime import cli, first_check, running
from bel.runtime.cli import NAME, main_command
from bel.runtime.engine import Engine
from bel.runtime.run_options import RunOptions
from faults import HANG_SECONDS

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-moe-q8_0.gguf"
COMMAND = Path(sys.executable).with_name(NAME)
PROMPT = "def add(a, b):\n    return"
ONE_THREAD = ("--threads", "1", "--context", "512")
FLOOR = "4"  # the example's top-k


@dataclass(frozen=True)
class Ended:
    status: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        assert self.status == 0, self.stderr
        return json.loads(self.stdout)


Run = Callable[..., Ended]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, converted.  Do not change it."""
    bundle = tmp_path_factory.mktemp("run") / "tiny.bel"
    assert run_command(repack, "bel-repack", [str(EXAMPLE), "-o", str(bundle)]) == 0
    return bundle


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """A bundle to be damaged."""
    subprocess.run(["cp", "-r", model, tmp_path / "copy.bel"], check=True)
    return tmp_path / "copy.bel"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process, with one thread."""

    def run(*arguments: object) -> Ended:
        capsys.readouterr()
        handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            status = run_command(main_command, NAME, [*ONE_THREAD, *map(str, arguments)])
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return Ended(status, *capsys.readouterr())

    return run


def process(*arguments: object, **settings: Any) -> subprocess.Popen[bytes]:
    """The installed command as a process of its own."""
    pipe = subprocess.PIPE
    return subprocess.Popen([COMMAND, *ONE_THREAD, *map(str, arguments)], stdout=pipe, stderr=pipe, **settings)


def ended(started: subprocess.Popen[bytes], data: bytes | None = None) -> Ended:
    out, err = started.communicate(data, timeout=HANG_SECONDS)
    assert b"Traceback" not in err
    return Ended(started.returncode, out.decode(), err.decode())


@pytest.fixture(scope="module")
def stock() -> Any:
    """What stock llama.cpp answers to the prompt: the JSON object."""
    return ended(process(EXAMPLE, "--stock", "-p", PROMPT, "-n", 24, "--json")).json


# --- the text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [FLOOR, "8", "32"])
def test_the_tokens_are_those_of_stock_whatever_is_in_slots(run: Run, model: Path, stock: Any, slots: str) -> None:
    answer = run(model, "-p", PROMPT, "-n", 24, "--slots", slots, "--json").json
    assert len(answer["tokens"]) == 24
    assert (answer["tokens"], answer["text"]) == (stock["tokens"], stock["text"])
    assert set(answer["load"]["slots_by_layer"].values()) == {int(slots)}


def test_text_goes_to_stdout_and_the_rest_to_stderr(run: Run, model: Path, stock: Any) -> None:
    done = run(model, "-p", PROMPT, "-n", 24, "--slots", 8, "--stats")
    assert done.status == 0
    assert done.stdout == stock["text"]
    first, second = done.stderr.splitlines()[:2]
    assert "6 layers, slots per layer (min/median/max) 8/8/8 of 32: 48 of 192 experts (25 %)" in first
    assert "preloaded 0 B; policy lfu-decay:0.98; reader " in first
    assert re.search(r"memory [\d.]+ MiB \(no limit given.*\) = process .* \+ dense .* \+ KV .* \+ compute .* \+ slots", second)
    for row in ("prompt", "decode", "decode experts", "decode reads", "decode time", "major faults", "peak memory"):
        assert re.search(rf"^  {row} ", done.stderr, re.MULTILINE), row


@pytest.mark.parametrize("arguments", [(), ("-f", "-")])
def test_the_prompt_may_come_from_standard_input(model: Path, stock: Any, arguments: tuple[str, ...]) -> None:
    done = ended(process(model, "-n", 24, *arguments, stdin=subprocess.PIPE), PROMPT.encode())
    assert (done.status, done.stdout) == (0, stock["text"])


def test_the_prompt_may_be_a_file_or_a_pipe(run: Run, model: Path, stock: Any, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text(PROMPT)
    assert run(model, "-n", 24, "-f", tmp_path / "p.txt").stdout == stock["text"]
    reading, writing = os.pipe()
    os.write(writing, PROMPT.encode())
    os.close(writing)
    assert run(model, "-n", 24, "-f", f"/proc/self/fd/{reading}").stdout == stock["text"]
    os.close(reading)


def test_text_is_utf8_whatever_the_locale_says(tmp_path: Path) -> None:
    """A random model writes bytes of all kinds, and a Latin-1 stream could not take what stands for them."""
    path = archs.make_model("qwen3moe", tmp_path / "m.gguf")
    environment = os.environ | {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    arguments = (path, "--stock", "-p", "ab", "-n", "40", "--ignore-eos")
    done = ended(process(*arguments, env=environment))
    assert done.status == 0
    assert "\ufffd" in done.stdout
    assert done.stdout == ended(process(*arguments, "--json")).json["text"]


def test_a_seed_repeats_what_temperature_draws(run: Run, model: Path) -> None:
    drawn = [run(model, "-p", PROMPT, "-n", 16, "--temp", 1.5, "--seed", s, "--json").json["tokens"] for s in (5, 5, 6)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_chat_puts_the_message_into_the_models_template(run: Run, model: Path) -> None:
    plain = run(model, "-p", "Hello", "-n", 8, "--json").json
    chat = run(model, "-p", "Hello", "-n", 8, "--chat", "--json").json
    assert chat["speed"]["prompt_tokens"] > plain["speed"]["prompt_tokens"] > 0


def test_chat_without_a_template_is_refused(run: Run, tmp_path: Path) -> None:
    path = archs.make_model("qwen3moe", tmp_path / "m.gguf")
    done = run(path, "--stock", "--chat", "-p", "Hello")
    assert done.status == 3
    assert "no chat template" in done.stderr


def test_a_full_context_ends_the_text_and_says_so(run: Run, model: Path) -> None:
    done = run(model, "-p", PROMPT, "-n", 400, "--ignore-eos", "--context", 64, "--json", "--ubatch", 8)
    answer = done.json
    assert answer["ended"] == "context_full"
    assert len(answer["tokens"]) == 64 - answer["speed"]["prompt_tokens"] + 1
    assert "the context is full (64 positions, --context gives more)" in done.stderr


def test_the_trained_context_ends_the_text_where_none_was_asked_for(tmp_path: Path) -> None:
    path = archs.make_model("qwen3moe", tmp_path / "m.gguf")
    command = [COMMAND, path, "--stock", "-p", "a" * 100, "-n", "100000", "--ignore-eos", "--threads", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    answer = json.loads(done.stdout)
    assert answer["ended"] == "context_full"
    assert "all that the model was trained for" in done.stderr
    assert "more than" not in done.stderr


def test_a_context_beyond_the_trained_one_is_warned_about(run: Run, tmp_path: Path) -> None:
    path = archs.make_model("qwen3moe", tmp_path / "m.gguf")
    with Engine.open().load(path) as model:
        trained = model.n_ctx_train
    for context, is_beyond in ((trained, False), (trained + 256, True)):
        done = run(path, "--stock", "-p", "a", "-n", 1, "--context", context)
        assert (f"more than the {trained} tokens that the model was trained for" in done.stderr) == is_beyond


# --- JSON -----------------------------------------------------------------------------------------------------------


def test_the_json_object_has_what_the_command_promises(run: Run, model: Path) -> None:
    answer = run(model, "-p", PROMPT, "-n", 12, "--slots", 8, "--policy", "lru", "--json").json
    assert isinstance(answer["text"], str)
    load, speed, cache = answer["load"], answer["speed"], answer["cache"]
    assert load["layers"] == 6
    assert load["slots_by_layer"] == {str(layer): 8 for layer in range(6)}
    assert (load["uploaded_bytes"], load["policy"]) == (0, "lru")
    assert load["reader"] in ("io_uring", "threads", "buffered")
    parts = ("process", "dense", "kv", "compute", "call", "slots", "margin")
    assert sum(load["memory"][f"{part}_bytes"] for part in parts) == load["memory"]["total_bytes"]
    assert speed["prompt_tokens_per_s"] == speed["prompt_tokens"] / speed["prompt_seconds"]
    assert speed["decode_tokens"] == 11
    assert speed["decode_tokens_per_s"] == 11 / speed["decode_seconds"]
    assert cache["accesses"] == 11 * 6 * int(FLOOR)
    assert cache["hits"] + cache["misses"] == cache["accesses"]
    assert 0 < cache["misses"] < cache["accesses"]
    stride = open_bundle(model).manifest.layers[0].stride_bytes
    assert cache["bytes_per_token"] == {"nvme": (cache["misses"] + cache["prefetch_wasted"]) * stride / 11}
    assert cache["stall_seconds"] > 0
    assert cache["prompt"]["accesses"] > 0
    assert answer["major_faults_per_token"] >= 0
    assert answer["peak_rss_bytes"] > load["memory"]["dense_bytes"]


def test_stock_has_no_cache_and_no_slots(stock: Any) -> None:
    assert (stock["cache"], stock["load"]["slots_by_layer"], stock["load"]["policy"]) == (None, None, None)
    assert stock["load"]["reader"] == "mmap"
    assert stock["speed"]["decode_tokens"] == 23


def test_a_quantity_without_a_denominator_is_null(run: Run, model: Path) -> None:
    answer = run(model, "-p", PROMPT, "-n", 1, "--json").json
    assert len(answer["tokens"]) == 1
    assert answer["speed"]["decode_tokens_per_s"] is None
    assert answer["cache"]["hit_rate"] is None
    assert answer["major_faults_per_token"] is None


# --- memory and plans -----------------------------------------------------------------------------------------------


def test_too_little_memory_names_what_would_do_and_that_does(model: Path) -> None:
    done = ended(process(model, "-p", "hi", "--ram", "20M"))
    assert done.status == 2
    named = re.search(r"Give --ram (\d+M) or more", done.stderr)
    assert named, done.stderr
    answer = ended(process(model, "-p", "hi", "-n", 4, "--ram", named[1], "--json")).json
    memory = answer["load"]["memory"]
    assert memory["total_bytes"] <= memory["promised_bytes"] == int(named[1][:-1]) << 20
    assert answer["peak_rss_bytes"] <= memory["promised_bytes"]


def test_without_a_budget_what_is_free_is_taken_and_said(run: Run, model: Path) -> None:
    done = run(model, "-p", "hi", "-n", 2)
    assert "32/32/32 of 32: 192 of 192 experts (100 %)" in done.stderr
    assert "that is free now" in done.stderr


def test_too_little_free_memory_says_that_nobody_asked_for_it(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "spare_bytes", lambda: 1 << 20)
    done = run(model, "-p", "hi", "-n", 2)
    assert done.status == 2
    assert "no --ram was given, and this is what is free here" in done.stderr


@pytest.mark.parametrize("free_mib", [0, 1, 64, 96, 300, 4096, 65536])
def test_the_reserve_leaves_most_of_what_is_free(free_mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In small containers too; in large ones at least 256 MiB stay for others."""
    monkeypatch.setattr(running, "free_bytes", lambda: free_mib << 20)
    monkeypatch.setattr(running, "rss_bytes", lambda: 0)
    spare = running.spare_bytes()
    assert 3 * (free_mib << 20) // 4 <= spare <= free_mib << 20
    assert free_mib < 1024 or (free_mib << 20) - spare >= 256 << 20


def test_a_static_set_without_a_plan_is_called_what_it_is(run: Run, model: Path, stock: Any) -> None:
    done = run(model, "-p", PROMPT, "-n", 8, "--policy", "static", "--json")
    assert done.json["cache"]["hits"] == 0
    assert done.json["tokens"] == stock["tokens"][:8]
    assert "there is no plan" in done.stderr


def _plan(bundle: Bundle, **changes: Any) -> Plan:
    """A plan with as many slots for layer L as its top-k and L more, of which the first two experts are preloaded."""
    reached = [x for x in bundle.manifest.layers if not x.is_mtp]
    layers = tuple(
        PlanLayer(x.layer, x.n_expert, x.n_used or 1, x.stride_bytes, (x.n_used or 1) + x.layer, (7, 3)) for x in reached
    )
    none = Prediction()
    values: dict[str, Any] = {
        "model_name": bundle.manifest.model_name or "",
        "arch": bundle.manifest.arch or "",
        "fingerprint": fingerprint(bundle),
        "objective": MISSES,
        "clock": None,
        "policy": "lru",
        "split": None,
        "budget_bytes": sum(x.slots * x.slot_bytes for x in layers),
        "layers": layers,
        "predicted": dict.fromkeys(COLUMNS, none),
        "workloads": (PlanWork("code", 1.0, none, none, none, none, None),),
        "profile_digests": (),
        "notes": (),
    }
    return Plan(**values | changes)


def test_a_plan_gives_each_layer_its_slots_and_its_first_experts(run: Run, model: Path, stock: Any, tmp_path: Path) -> None:
    bundle = open_bundle(model)
    (tmp_path / "plan.json").write_bytes(encode_plan(_plan(bundle)))
    answer = run(model, "-p", PROMPT, "-n", 24, "--plan", tmp_path / "plan.json", "--json").json
    assert answer["load"]["slots_by_layer"] == {str(layer): 4 + layer for layer in range(6)}
    assert answer["load"]["uploaded_bytes"] == 2 * sum(x.stride_bytes for x in bundle.manifest.layers)
    assert answer["tokens"] == stock["tokens"]


@pytest.mark.parametrize("case", ["fingerprint", "layers"])
def test_a_plan_of_another_model_is_refused(run: Run, model: Path, tmp_path: Path, case: str) -> None:
    right = _plan(open_bundle(model))
    fewer = {"layers": right.layers[:-1], "budget_bytes": right.slots_bytes}
    wrong = _plan(open_bundle(model), model_name="other", **({"fingerprint": "ab" * 32} if case == "fingerprint" else fewer))
    (tmp_path / "plan.json").write_bytes(encode_plan(wrong))
    done = run(model, "-p", "hi", "--plan", tmp_path / "plan.json")
    assert done.status == 3
    for word in ("plan of another model", case, "'other'", "tiny.bel", "plan.json"):
        assert word in done.stderr, word


# --- what is refused ------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "a GGUF without --stock": (("GGUF", "-p", "x"), 2, ("bel-repack", "--stock")),
    "a bundle with --stock": (("BUNDLE", "-p", "x", "--stock"), 2, ("--stock", "bundle")),
    "slots for stock": (("GGUF", "-p", "x", "--stock", "--slots", "8"), 2, ("--slots is for a bundle",)),
    "memory for stock": (("GGUF", "-p", "x", "--stock", "--ram", "8G"), 2, ("--ram is for a bundle",)),
    "two budgets": (("BUNDLE", "-p", "x", "--slots", "8", "--ram", "8G"), 2, ("--slots and --ram", "exclude")),
    "two prompts": (("BUNDLE", "-p", "x", "-f", "y"), 2, ("-p and -f",)),
    "an empty prompt": (("BUNDLE", "-p", ""), 3, ("prompt is empty",)),
    "a missing prompt file": (("BUNDLE", "-f", "nowhere.txt"), 3, ("nowhere.txt", "no such file")),
    "a folder as prompt": (("BUNDLE", "-f", "/"), 3, ("not a file",)),
    "no such bundle": (("nowhere.bel", "-p", "x"), 3, ("nowhere.bel", "no such bundle")),
    "no such plan": (("BUNDLE", "-p", "x", "--plan", "nowhere.json"), 3, ("nowhere.json", "no such plan")),
    "a folder as plan": (("BUNDLE", "-p", "x", "--plan", "/"), 3, ("not a plan", "which is a file")),
    "an unknown policy": (("BUNDLE", "-p", "x", "--policy", "best"), 2, ("'best'", "lfu-decay:R")),
    "fewer slots than top-k": (("BUNDLE", "-p", "x", "--slots", "3"), 2, ("top-k", "--slots 4")),
    "a GPU": (("BUNDLE", "-p", "x", "--gpu", "1"), 5, ("there is no GPU", "docs/gpu.md")),
    "a GPU without a way": (("BUNDLE", "--gpu", "-p", "x"), 5, ("there is no GPU",)),
    "a size that is none": (("BUNDLE", "-p", "x", "--ram", "much"), 2, ("'much' is not a size",)),
    "a temperature that is none": (("BUNDLE", "-p", "x", "--temp", "nan"), 2, ("--temp",)),
    "a prompt above the context": (("BUNDLE", "-p", "x " * 2000), 2, ("does not fit", "--context")),
    "no prompt": (("BUNDLE",), 3, ("standard input", "empty")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_with_the_next_step(run: Run, model: Path, case: str) -> None:
    arguments, status, words = REFUSED[case]
    done = run(*({"GGUF": str(EXAMPLE), "BUNDLE": str(model)}.get(a, a) for a in arguments))
    assert (done.status, done.stdout) == (status, ""), done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


def test_a_terminal_is_no_prompt_unless_asked_for(model: Path) -> None:
    """Without this the command would wait for a person who does not know it."""
    ours, theirs = os.openpty()
    try:
        done = ended(process(model, stdin=theirs))
    finally:
        os.close(theirs)
        os.close(ours)
    assert (done.status, done.stdout) == (2, "")
    assert "Give a text with -p" in done.stderr


def test_help_names_every_option_of_the_design(run: Run) -> None:
    text = run("--help").stdout
    for option in ("-p", "-f", "-n", "--plan", "--slots", "--ram", "--policy", "--context", "--threads", "--temp", "--seed"):
        assert re.search(rf"^\s+{option}\b", text, re.MULTILINE), option
    for option in ("--chat", "--stats", "--json", "--stock", "--bench", "--check-against", "--gpu", "--vram"):
        assert option in text, option


@pytest.mark.parametrize("mode", cli._MODES)
def test_a_mode_is_a_command_of_its_own_that_knows_its_option(mode: str, run: Run) -> None:
    module, _, name = cli._MODES[mode].partition(":")
    command = getattr(importlib.import_module(module), name)
    assert isinstance(command, click.Command)
    assert any(mode in p.opts for p in command.params)
    done = run(mode, "--help")
    assert done.status == 0
    assert done.stdout.startswith(f"Usage: {NAME} ")
    assert run("--help").stdout != done.stdout


# --- faults ---------------------------------------------------------------------------------------------------------


def _flip(bundle: Path, layer: int, expert: int) -> None:
    """Change one byte of an expert's last part."""
    manifest = open_bundle(bundle).manifest
    row = manifest.layers[layer]
    place = row.part_offset(expert, row.parts[-1]) + 5
    with bundle.joinpath(manifest.experts[row.shard].name).open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))


def test_a_damaged_blob_is_found_before_anything_is_computed(run: Run, copy: Path) -> None:
    _flip(copy, 5, 31)
    done = run(copy, "-p", PROMPT)
    assert (done.status, done.stdout) == (4, "")
    assert "expert 31 of layer 5" in done.stderr
    assert "experts.bin" in done.stderr


def test_a_damaged_blob_of_the_prompt_ends_the_run(run: Run, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first graph of all, when the weights of the later layers have no memory yet."""
    monkeypatch.setattr(first_check.check_tails, "__defaults__", (0,))
    for expert in range(32):
        _flip(copy, 1, expert)
    done = run(copy, "-p", PROMPT, "--slots", FLOOR)
    assert (done.status, done.stdout) == (4, "")
    assert re.search(r"expert \d+ of layer 1 ", done.stderr)


def test_a_damaged_blob_leaves_the_text_so_far(run: Run, copy: Path, stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert that only a later token chooses: found in the counters of undamaged runs."""
    monkeypatch.setattr(first_check.check_tails, "__defaults__", (0,))
    late = _late_expert(copy, stock["tokens"])
    _flip(copy, 0, late)
    done = run(copy, "-p", PROMPT, "-n", 24, "--slots", FLOOR)
    assert done.status == 4
    assert f"expert {late} of layer 0" in done.stderr
    assert done.stdout
    assert stock["text"].startswith(done.stdout)


def _late_expert(bundle: Path, tokens: list[int]) -> int:
    """An expert of layer 0 that the prompt does not use and a token behind it does."""
    with running.open_running(RunOptions(bundle, n_ctx=512, n_threads=1)) as run:
        assert run.bundle is not None
        run.context.decode(run.model.tokenize(PROMPT))
        before = set(run.bundle.cache.resident(0))
        for token in tokens[:-1]:
            run.context.decode([token])
        return min(set(run.bundle.cache.resident(0)) - before)


def test_a_damaged_dense_weight_is_found(run: Run, copy: Path) -> None:
    manifest = open_bundle(copy).manifest
    tensor = next(t for t in manifest.tensors if t.dest == "dense" and t.name.endswith("attn_q.weight"))
    with copy.joinpath(manifest.dense.name).open("r+b") as file:
        file.seek(tensor.dest_offset_bytes + tensor.size_bytes // 2)
        file.write(b"\x55\xaa")
    done = run(copy, "-p", PROMPT)
    assert done.status == 4
    assert tensor.name in done.stderr
    assert manifest.dense.name in done.stderr


@pytest.mark.parametrize("name", ["dense.gguf", "experts.bin", "experts.idx", "manifest.json"])
def test_a_missing_file_is_damage(run: Run, copy: Path, name: str) -> None:
    path = next(p for p in copy.iterdir() if p.name.endswith(name))
    path.unlink()
    done = run(copy, "-p", PROMPT)
    assert done.status == 4
    assert path.name in done.stderr


@pytest.mark.parametrize(("fault", "status", "words"), [("EIO", 5, ("Input/output error",)), ("short", 4, ("the file ends",))])
def test_a_failing_read_ends_the_run(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, fault: str, status: int, words: tuple[str, ...]
) -> None:
    """The fiftieth read of the experts: in the middle of the prompt."""
    real, count = os.preadv, 0

    def failing(*arguments: Any) -> int:
        nonlocal count
        count += 1
        if count >= 50 and fault == "EIO":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return 0 if count >= 50 else real(*arguments)

    monkeypatch.setattr(os, "preadv", failing)
    done = run(model, "-p", PROMPT, "--reader", "threads", "--slots", FLOOR)
    assert (done.status, done.stdout) == (status, "")
    for word in (*words, "experts.bin", "at byte"):
        assert word in done.stderr
    monkeypatch.undo()
    assert run(model, "-p", PROMPT, "-n", 1).status == 0  # nothing of it is left in this process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_text_in_order(model: Path, number: signal.Signals) -> None:
    """A real signal to a real process, once it has begun to write."""
    started = process(model, "-p", PROMPT, "-n", 100000, "--ignore-eos", "--context", 100000, "--stats")
    assert started.stdout is not None
    begun = started.stdout.read(30)
    started.send_signal(number)
    done = ended(started)
    assert len(begun) == 30
    assert done.status == 130
    assert re.search(r"interrupted behind \d+ tokens", done.stderr)
    assert "decode experts" in done.stderr


def test_a_reader_that_has_gone_ends_the_run_without_a_word(model: Path) -> None:
    """`bel-run ... | head -c 1`."""
    started = process(model, "-p", PROMPT, "-n", 100000, "--ignore-eos", "--context", 100000)
    assert started.stdout is not None
    assert started.stderr is not None
    started.stdout.read(1)
    started.stdout.close()
    said = started.stderr.read().decode()
    started.stderr.close()
    assert started.wait(HANG_SECONDS) == 141
    assert "error" not in said
