"""What `bel-run` answers: stock's text whatever is in slots, from any prompt, and the JSON object."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import archs
from bel.formats.bundle import open_bundle
from bel.runtime.engine import Engine
from faults import HANG_SECONDS
from run_answers import COMMAND, FLOOR, PROMPT, Run, ended, process
from run_answers import model as model
from run_answers import run as run
from run_answers import stock as stock

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
