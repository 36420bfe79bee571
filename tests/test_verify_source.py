"""`bel-repack verify --source`: whether a bundle is of this source, and an answer about every byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import synth
from faults import run_cli
from repack_answers import assert_error, repacked


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return synth.moe().write(tmp_path / "m.gguf")


@pytest.fixture
def bundle(model: Path) -> Path:
    return repacked(model)


def test_verify_against_the_right_source(bundle: Path, model: Path, tmp_path: Path) -> None:
    assert run_cli("verify", bundle, "--source", model).status == 0
    shutil.copyfile(model, tmp_path / "renamed.gguf")
    assert run_cli("verify", bundle, "--source", tmp_path / "renamed.gguf", "--quick").status == 0


@pytest.mark.parametrize("quick", [[], ["--quick"]])
def test_verify_against_a_model_of_the_same_shape(bundle: Path, tmp_path: Path, quick: list[str]) -> None:
    other = synth.moe(seed=1).write(tmp_path / "other.gguf")
    outcome = run_cli("verify", bundle, "--source", other, "--json", *quick)
    assert outcome.status == 4
    problems = json.loads(outcome.stdout)["problems"]
    assert all(str(other) in p for p in problems)
    assert any("blk.1.ffn_down_exps.weight" in p for p in problems)
    assert any("sha256" in p for p in problems)


def test_verify_finds_one_changed_bit_of_a_source_anywhere(bundle: Path, model: Path) -> None:
    """Header, tensors of every kind, the last byte: `--source` is an answer about every byte."""
    data = model.read_bytes()
    for at in (30, 700, 1100, 1300, 5000, len(data) // 2, len(data) - 1):
        changed = bytearray(data)
        changed[at] ^= 1
        model.write_bytes(changed)
        outcome = run_cli("verify", bundle, "--source", model)
        assert outcome.status in (3, 4), (at, outcome)
        assert str(model) in outcome.stderr


def test_verify_names_a_source_of_another_size(bundle: Path, tmp_path: Path) -> None:
    other = synth.moe(tail=b"more").write(tmp_path / "other.gguf")
    outcome = run_cli("verify", bundle, "--source", other)
    assert outcome.status == 4
    assert str(other) in outcome.stderr.splitlines()[0]


def test_verify_does_not_call_a_sound_bundle_damaged(bundle: Path, tmp_path: Path) -> None:
    outcome = run_cli("verify", bundle, "--source", synth.moe(seed=1).write(tmp_path / "other.gguf"))
    assert outcome.status == 4
    assert "is damaged" not in outcome.stderr


def test_verify_without_the_source_that_was_named(bundle: Path, tmp_path: Path) -> None:
    assert_error(run_cli("verify", bundle, "--source", tmp_path / "gone.gguf"), 3, tmp_path / "gone.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(60))
    assert_error(run_cli("verify", bundle, "--source", tmp_path / "bad.gguf", "--json"), 3, tmp_path / "bad.gguf")
