"""Runs of bel-repack that something stops: their sources, what is made where nothing does, and how one is refused."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

import synth
from faults import Outcome, run_cli, tree

FRONT = {
    "license": "mit",
    "base_model": "org/base",
    "base_model_relation": "quantized",
    "library_name": "gguf",
    "pipeline_tag": "text-generation",
    "tags": ["gguf", "moe", "expert-offload", "bel"],
}
"""What the head of a generated card says."""


def ple_model(seed: int = 0) -> synth.Gguf:
    """A model that gives every kind of file of a bundle: dense, PLE, experts, kept bytes in a gap and in the tail."""
    table = synth.Tensor("per_layer_token_embd.weight", (64, 8), synth.Q8_0, gap_bytes=64)
    return synth.moe(tensors=[table, *synth.moe_tensors()], seed=seed, pad_byte=7, tail=b"tail")


def write_set(folder: Path, seed: int = 0) -> Path:
    """A split set of two files in a folder; the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, shard in synth.split(ple_model(seed), [6, 7]).items():
        shard.write(folder / name)
    return folder / "model-00001-of-00002.gguf"


def big_model(folder: Path, mib: int = 96) -> Path:
    """A model that takes long enough to be caught at work."""
    experts = mib * 2**20 // (3 * 2 * 1114112)
    block = random.Random(1).randbytes(1114112)
    stacks = [
        synth.Tensor(f"blk.{layer}.ffn_{role}_exps.weight", (1024, 1024, experts), synth.Q8_0, block * experts)
        for layer in range(2)
        for role in ("gate", "up", "down")
    ]
    folder.mkdir(parents=True, exist_ok=True)
    return synth.Gguf(synth.moe_entries(experts=experts), stacks).write(folder / "big.gguf")


def assert_refused(outcome: Outcome, status: int, *words: object) -> None:
    """One clear message and the right status: no traceback, nothing on stdout."""
    assert outcome.status == status, outcome
    assert "Traceback" not in outcome.stderr, outcome.stderr
    assert outcome.stdout == "", outcome.stdout
    told = outcome.stderr.removeprefix("\n")  # click ends the line of a terminal's ^C
    assert told.startswith("bel-repack: error: "), outcome.stderr
    assert told.count("\n") == 1, outcome.stderr
    for word in words:
        assert str(word) in outcome.stderr, (word, outcome)


def undisturbed(folder: Path, source: Path) -> dict[str, tuple[str, int]]:
    """The files that an undisturbed run makes."""
    assert run_cli(source, "-o", folder / "reference.bel").status == 0
    made = tree(folder / "reference.bel")
    shutil.rmtree(folder / "reference.bel")
    return made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A split set to convert; the path of its first file."""
    return write_set(tmp_path / "in")


@pytest.fixture
def reference(tmp_path: Path, source: Path) -> dict[str, tuple[str, int]]:
    """What an undisturbed run makes of it."""
    return undisturbed(tmp_path, source)
