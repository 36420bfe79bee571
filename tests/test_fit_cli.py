"""`bel-profile fit` as a user meets it: the table, what it says beside its answer, and wrong command lines."""

from __future__ import annotations

from pathlib import Path

import pytest

import synth
from fit_answers import fit_answer, run_fit
from fit_models import metadata_model, slot_model


def test_the_table_names_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_fit(capsys, slot_model(tmp_path), "--vram", "100M", "--ram", "200M")
    assert (status, err) == (0, "")
    for word in ("dense weights", "KV cache (f16)", "compute buffer", "margin", "expert slots", "experts in RAM", "on disk"):
        assert word in out
    assert "40 of 40 experts in each of 2 layers" in out


def test_without_ram_this_machines_is_taken_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer, err = fit_answer(capsys, slot_model(tmp_path))
    assert answer["vram_bytes"] == 0
    assert answer["ram_bytes"] > 0
    assert "no --ram" in err


def test_a_context_beyond_the_training_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = fit_answer(capsys, slot_model(tmp_path), "--ram", "1G", "--context", 8193)
    assert "8192 tokens" in err
    assert fit_answer(capsys, slot_model(tmp_path), "--ram", "1G", "--context", 8192)[1] == ""


def test_the_default_context_is_what_the_model_was_trained_for_if_that_is_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `bel-run` does: nobody is told of an option that was not given, and no cache is counted that is never made."""
    metadata = {"block_count": 1, "expert_used_count": 2, "attention.head_count": 4, "embedding_length": 64}
    for trained, expected in ((512, 512), (8192, 8192), (40960, 8192), (None, 8192)):
        known = metadata if trained is None else metadata | {"context_length": trained}
        answer, err = fit_answer(capsys, metadata_model(tmp_path / f"{trained}.gguf", "qwen3moe", known), "--ram", "1G")
        assert answer["context"] == expected
        assert "--context" not in err


def test_a_model_without_heads_is_said_to_have_no_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = metadata_model(tmp_path / "m.gguf", "qwen3moe", {"block_count": 1, "expert_used_count": 2})
    answer, err = fit_answer(capsys, path, "--ram", "1G")
    assert answer["kv_bytes"] == 0
    assert "0 bytes are counted" in err


@pytest.mark.parametrize("arguments", [("--context", "0"), ("--kv", "q9_0"), ("--vram", "much"), ("--slots", "-1")])
def test_senseless_options_are_usage_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, str]
) -> None:
    status, out, err = run_fit(capsys, slot_model(tmp_path), "--ram", "1G", *arguments, "--json")
    assert (status, out) == (2, "")
    assert "Traceback" not in err


def test_a_file_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(synth.moe().blob()[:100])
    status, out, err = run_fit(capsys, path, "--ram", "1G", "--json")
    assert (status, out) == (3, "")
    assert str(path) in err
