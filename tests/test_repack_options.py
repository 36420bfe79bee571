"""What the options of bel-repack change, and what they leave as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

import synth
from faults import run_cli, tree
from repack_answers import answer, assert_error, ple_model
from repack_answers import model as model


def test_dry_run_writes_nothing(model: Path, tmp_path: Path) -> None:
    before = tree(tmp_path, times=True)
    for flags in ([], ["--json"], ["--force"], ["-o", tmp_path / "x.bel"]):
        assert run_cli(model, "--dry-run", *flags).status == 0
        assert tree(tmp_path, times=True) == before


@pytest.mark.parametrize(
    ("size", "files"),
    [("45GB", 1), ("70k", 1), ("69632", 1), ("69631", 2), ("36864", 2), ("36.9kB", 2), ("36KiB", 2), ("40K", 2)],
)
def test_shard_size(model: Path, tmp_path: Path, size: str, files: int) -> None:
    assert run_cli(model, "--shard-size", size).status == 0
    made = sorted(p.name for p in (tmp_path / "m.bel").glob("*.bin"))
    assert made == (["m-experts.bin"] if files == 1 else ["m-experts-00001-of-00002.bin", "m-experts-00002-of-00002.bin"])
    assert run_cli("verify", tmp_path / "m.bel", "--source", model).status == 0
    assert run_cli("verify", tmp_path / "m.bel", "--quick").status == 0
    assert run_cli("restore", tmp_path / "m.bel", "-o", tmp_path / "back").status == 0
    assert (tmp_path / "back" / "m.gguf").read_bytes() == model.read_bytes()


@pytest.mark.parametrize("size", ["36863", "1", "0"])
def test_a_layer_larger_than_the_shard_size_is_refused(model: Path, tmp_path: Path, size: str) -> None:
    for flags in ([], ["--dry-run"]):
        assert_error(run_cli(model, "--shard-size", size, *flags), 2, "blk.0", "36864", f"--shard-size {size}")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    assert run_cli(model, "--shard-size", "36864").status == 0, "the size that the message gives is enough"


@pytest.mark.parametrize(
    ("mode", "elements", "is_split"),
    [("auto", 64, True), ("auto", 32 * 2, True), ("keep", 2048, False), ("split", 32, True), ("auto", 32, True)],
)
def test_ple(tmp_path: Path, mode: str, elements: int, is_split: bool) -> None:
    path = ple_model(elements).write(tmp_path / "m.gguf")
    done = answer(run_cli(path, "--ple", mode, "--json"))
    assert (tmp_path / "m.bel" / "m-ple.gguf").exists() == is_split == (done["ple_bytes"] > 0)
    assert run_cli("verify", tmp_path / "m.bel", "--source", path).status == 0
    assert run_cli("restore", tmp_path / "m.bel", "-o", tmp_path / "back").status == 0
    assert (tmp_path / "back" / "m.gguf").read_bytes() == path.read_bytes()


def test_ple_auto_keeps_a_small_table_where_it_is(tmp_path: Path) -> None:
    large = synth.Tensor("token_embd.weight", (4096, 8), synth.F32)
    table = synth.Tensor("per_layer_token_embd.weight", (64, 8), synth.Q8_0)
    path = synth.moe(tensors=[large, table, *synth.moe_tensors()[1:]]).write(tmp_path / "m.gguf")
    for mode, is_split in (("auto", False), ("split", True)):
        assert run_cli(path, "--ple", mode, "--force").status == 0
        assert (tmp_path / "m.bel" / "m-ple.gguf").exists() == is_split
    assert run_cli(synth.moe().write(tmp_path / "n.gguf"), "--ple", "split").status == 0
    assert not (tmp_path / "n.bel" / "n-ple.gguf").exists(), "nothing to split off"


def test_no_verify(model: Path, tmp_path: Path) -> None:
    table = run_cli(model, "--no-verify")
    assert table.status == 0
    assert "not (--no-verify)" in table.stdout
    made = tree(tmp_path / "m.bel")
    assert "every byte" in run_cli(model, "--force").stdout
    assert tree(tmp_path / "m.bel") == made
