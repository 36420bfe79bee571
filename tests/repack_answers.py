"""Small models for bel-repack on a command line, and what it answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import synth
from faults import Outcome, run_cli


def ple_model(table_elements: int = 64, **settings: Any) -> synth.Gguf:
    """A model with a per-layer-embedding table of 34/32 bytes an element and 8 rows."""
    table = synth.Tensor("per_layer_token_embd.weight", (table_elements, 8), synth.Q8_0)
    return synth.moe(tensors=[table, *synth.moe_tensors()], **settings)


def write_set(folder: Path, model: synth.Gguf, counts: list[int], base: str = "model") -> list[Path]:
    """A split set in a folder."""
    return [shard.write(folder / name) for name, shard in synth.split(model, counts, base).items()]


def answer(outcome: Outcome) -> dict[str, Any]:
    """The one JSON object that a successful `--json` prints, and nothing else."""
    assert outcome.status == 0, outcome

    def refuse(text: str) -> float:
        raise AssertionError(f"{text} is not JSON")

    value = json.loads(outcome.stdout, parse_constant=refuse)
    assert outcome.stdout.count("\n") == 1
    assert isinstance(value, dict)
    return value


def assert_error(outcome: Outcome, status: int, *words: object) -> None:
    assert outcome.status == status, outcome
    assert outcome.stdout == ""
    assert "Traceback" not in outcome.stderr, outcome.stderr
    for word in words:
        assert str(word) in outcome.stderr, (word, outcome.stderr)


def repacked(model: Path) -> Path:
    """The bundle beside its model."""
    assert run_cli(model).status == 0
    return model.with_name("m.bel")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small model to convert."""
    return synth.moe().write(tmp_path / "m.gguf")
