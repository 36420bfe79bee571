"""`bel-run BUNDLE --check-against MODEL.gguf` as a user meets it: what it says, what it refuses, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archs
from bel.formats.bundle import open_bundle
from bel.formats.console import run_command
from bel.runtime import check as check_module
from bel.runtime.cli import NAME, main_command
from bel.runtime.engine import Engine, Model
from bel.runtime.pager import Pager
from exactness import repack

KEYS = {"ok", "tokens_compared", "router_records_compared", "logits_compared", "max_logit_difference", "first_mismatch"}
SLOTS = ("--threads", "1", "--slots", "2")
LAYERS, N_EMBD = 3, 64


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random model and its bundle: 3 layers of 8 experts, top-2."""
    folder = tmp_path_factory.mktemp("pair")
    source = archs.make_model("qwen3moe", folder / "model.gguf")
    return source, repack(source, folder / "model.bel")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    status = run_command(main_command, NAME, [str(x) for x in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def check(capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path], *arguments: object) -> tuple[int, dict[str, Any]]:
    """The JSON of a check."""
    status, out, err = run(capsys, pair[1], "--check-against", pair[0], *SLOTS, *arguments, "--json")
    assert out.count("\n") == 1, err

    def refuse(text: str) -> float:
        raise AssertionError(f"{text} is not JSON")

    return status, json.loads(out, parse_constant=refuse)


def skip_loads(monkeypatch: pytest.MonkeyPatch, expert: int) -> None:
    """A pager that never reads one expert."""
    start = Pager.start
    monkeypatch.setattr(Pager, "start", lambda self, loads, half: start(self, [x for x in loads if x.expert != expert], half))


# --- exact ----------------------------------------------------------------------------------------------------------


def test_json(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The promised keys, the numbers that follow from the prompt, and what the slots were."""
    status, answer = check(capsys, pair, "-p", "abcdefgh", "-n", 5)
    assert status == 0
    assert set(answer) == KEYS | {"load", "cache"}
    assert (answer["ok"], answer["max_logit_difference"], answer["first_mismatch"]) == (True, 0.0, None)
    assert answer["tokens_compared"] == 5
    assert answer["router_records_compared"] == LAYERS * 13
    assert answer["logits_compared"] == 13 * archs.N_VOCAB
    assert answer["load"]["slots_by_layer"] == dict.fromkeys("012", 2)
    assert answer["cache"]["decode"]["accesses"] == 5 * 2 * LAYERS
    assert answer["cache"]["decode"]["misses"] > 0


def test_text(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict comes first; how the bundle was loaded is on stderr."""
    status, out, err = run(capsys, pair[1], "--check-against", pair[0], "-p", "abcdefgh", "-n", 5, *SLOTS)
    assert status == 0
    assert out.startswith("exact: every bit is stock llama.cpp's\n")
    assert "router records compared  39\n" in out
    assert "largest difference       0.0\n" in out
    assert "slots per layer" in err


def test_prompts_of_every_kind(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Texts, files and folders add up; without any there are random tokens, which need no tokenizer."""
    (tmp_path / "folder").mkdir()
    for name, text in (("one.txt", "abc"), ("folder/two.txt", "defg"), ("folder/three.txt", "h")):
        (tmp_path / name).write_text(text)
    texts = ("-p", "xy", "-f", tmp_path / "one.txt", "-f", tmp_path / "folder")
    status, answer = check(capsys, pair, *texts, "-n", 2)
    assert (status, answer["tokens_compared"]) == (0, 4 * 2)
    assert answer["router_records_compared"] == LAYERS * (2 + 3 + 4 + 1 + 4 * 2)
    status, answer = check(capsys, pair, "-n", 2)
    assert (status, answer["tokens_compared"]) == (0, 3 * 2)
    assert answer["router_records_compared"] == LAYERS * (1 + 40 + 300 + 3 * 2)


def test_it_goes_on_behind_the_end_of_a_text(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many tokens as asked for are compared, whatever they are."""
    monkeypatch.setattr(Model, "is_end", lambda _self, _token: True)
    assert check(capsys, pair, "-p", "abc", "-n", 7)[1]["tokens_compared"] == 7


# --- not exact ------------------------------------------------------------------------------------------------------


def test_a_difference_is_exit_status_4(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is printed all the same, and all tokens are compared; people get the place."""
    skip_loads(monkeypatch, 3)
    status, answer = check(capsys, pair, "-p", "abcdefghijkl", "-n", 5, "--no-checksums")
    assert status == 4
    assert set(answer) == KEYS | {"load", "cache"}
    assert answer["ok"] is False
    assert answer["max_logit_difference"] > 0
    assert answer["tokens_compared"] == 5
    first = answer["first_mismatch"]
    assert set(first) == {"prompt", "position", "layer", "what", "found", "expected"}
    assert first["prompt"] == "-p number 1"
    assert 0 <= first["position"] < 17
    arguments = ("--check-against", pair[0], "-p", "abcdefghijkl", "-n", 5, "--no-checksums")
    status, out, _ = run(capsys, pair[1], *arguments, *SLOTS)
    assert status == 4
    assert out.startswith("NOT exact: the bundle differs from its source\n")
    assert f"{first['what']} at position {first['position']}" in out


def test_logits_that_are_no_numbers_are_null(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON has no NaN."""
    compare = check_module._compare

    def poisoned(run: Any, *rest: Any) -> Any:
        class Poisoned:
            def __init__(self, context: Any) -> None:
                self._context = context

            def __getattr__(self, name: str) -> Any:
                value = getattr(self._context, name)
                return np.full_like(value, np.nan) if name == "logits" else value

        return compare(replace(run, context=Poisoned(run.context)), *rest)

    monkeypatch.setattr(check_module, "_compare", poisoned)
    status, answer = check(capsys, pair, "-p", "abc", "-n", 2)
    assert (status, answer["ok"], answer["max_logit_difference"]) == (4, False, None)
    assert answer["first_mismatch"]["what"] == "logits"


# --- refused before anything long begins ----------------------------------------------------------------------------


CASES = ("another model", "no such source", "a bundle as source", "a file as bundle", "no such bundle", "stock")
CASES += ("no such prompts", "too few slots", "two budgets", "no such policy")


def refusals(pair: tuple[Path, Path], folder: Path) -> dict[str, tuple[Sequence[object], int, str]]:
    source, bundle = pair
    other = archs.make_model("qwen3moe", folder / "other.gguf", seed=5)
    check = ("--check-against", source)
    return {
        "another model": ((bundle, "--check-against", other), 3, "not the model that the bundle was made from"),
        "no such source": ((bundle, "--check-against", folder / "none.gguf"), 3, "none.gguf"),
        "a bundle as source": ((bundle, "--check-against", bundle), 2, "wants the GGUF that the bundle was made from"),
        "a file as bundle": ((source, *check), 2, "wants a bundle first"),
        "no such bundle": ((folder / "none.bel", *check), 3, "no such bundle"),
        "stock": ((bundle, *check, "--stock"), 2, "exclude each other"),
        "no such prompts": ((bundle, *check, "-f", folder / "none"), 3, "no such file or folder"),
        "too few slots": ((bundle, *check, "--slots", "1"), 2, "--slots 2"),
        "two budgets": ((bundle, *check, "--slots", "2", "--ram", "8G"), 2, "exclude each other"),
        "no such policy": ((bundle, *check, "--policy", "best"), 2, "the policy 'best' is not known"),
    }


@pytest.mark.parametrize("case", CASES)
def test_refusals(
    case: str,
    pair: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line, an empty stdout, and stock llama.cpp has computed nothing."""

    def must_not_run(*_: object) -> None:
        raise AssertionError("stock llama.cpp was run")

    monkeypatch.setattr(check_module, "_run_stock", must_not_run)
    arguments, expected, message = refusals(pair, tmp_path)[case]
    status, out, err = run(capsys, *arguments, "--threads", "1")
    assert (status, out) == (expected, "")
    assert message in err


def test_a_prompt_that_does_not_fit(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """It is named, with what would fit."""
    arguments = ("--check-against", pair[0], "-p", "abcdefgh", "-n", "600", "--context", "64", *SLOTS)
    status, out, err = run(capsys, pair[1], *arguments)
    assert (status, out) == (2, "")
    assert (
        "-p number 1 does not fit: it has 8 tokens, and 600 are to be generated; found 608 tokens, expected at most 64" in err
    )


def test_a_damaged_blob_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checksum speaks before any comparison could."""
    source = archs.make_model("qwen3moe", tmp_path / "model.gguf")
    bundle = repack(source, tmp_path / "model.bel")
    opened = open_bundle(bundle)
    layer = opened.manifest.layers[1]
    path = opened.path(opened.manifest.experts[layer.shard].name)
    data = bytearray(path.read_bytes())
    for expert in range(1, layer.n_expert):
        data[layer.part_offset(expert, layer.parts[0]) + 9] ^= 4
    path.write_bytes(data)
    status, out, err = run(capsys, bundle, "--check-against", source, "-p", "abcdefghijkl", *SLOTS)
    assert (status, out) == (4, "")
    assert "of layer 1" in err
    assert path.name in err


def test_help_needs_no_engine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of the check and of the run, with an example."""
    monkeypatch.setattr(Engine, "open", None)
    status, out, _ = run(capsys, "--check-against", "x.gguf", "--help")
    assert status == 0
    for word in ("--check-against", "--policy", "--slots", "-f prompts", "Exit status 4"):
        assert word in " ".join(out.split())


def test_the_real_command(pair: tuple[Path, Path]) -> None:
    """In a process of its own, which ends well."""
    command = [str(Path(sys.executable).with_name(NAME)), str(pair[1]), "--check-against", str(pair[0]), "-p", "ab", "-n", "2"]
    done = subprocess.run([*command, *SLOTS, "--json"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True
