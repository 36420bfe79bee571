"""Traces and profiles to simulate, made by hand, and what `bel-profile simulate` answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bel.formats.console import run_command
from bel.formats.trace import DECODE, PROMPT, TraceWriter
from bel.formats.trace_header import TraceHeader, TraceLayer
from bel.profiler.cli import NAME, main_group

PHASES = {"decode": {DECODE}, "prompt": {PROMPT}, "all": {PROMPT, DECODE}}
ROW_KEYS = [
    "policy",
    "scope",
    "slots_by_layer",
    "bytes",
    "phase",
    "accesses",
    "hits",
    "misses",
    "cold_misses",
    "uploads",
    "host_hits",
    "on_cpu",
    "hit_rate",
    "bytes_per_token",
    "regret",
    "seconds_per_token",
]
Calls = list[tuple[int, int, list[list[int]]]]  # (phase, place of the layer, rows of ids)
LAYERS = (TraceLayer(3, 5, 2, 1000), TraceLayer(7, 4, 2, 10))


def trace_of(path: Path, calls: Calls, layers: Sequence[TraceLayer] = LAYERS, **identity: str) -> Path:
    header = {"model_name": "tiny", "arch": "qwen3moe", "fingerprint": "f1", "workload": "chat", **identity}
    with TraceWriter(path, TraceHeader(layers=tuple(layers), **header), sync=False) as writer:  # type: ignore[arg-type]
        for number, (phase, place, rows) in enumerate(calls):
            tokens = np.arange(number, number + len(rows))
            writer.append(phase=phase, ubatch=number, layer=layers[place].layer, tokens=tokens, ids=np.array(rows, np.uint16))
    return path


def steps(*rows: list[int], phase: int = DECODE) -> Calls:
    """One call of the first layer for each row."""
    return [(phase, 0, [row]) for row in rows]


CYCLE = steps(*([[0, 1], [1, 2], [2, 3], [3, 0]] * 6))
FOUR = (TraceLayer(0, 4, 2, None),)


def rows_of(answer: tuple[int, str, str]) -> list[dict[str, Any]]:
    """The rows of the one JSON object on stdout."""
    status, out, err = answer
    assert (status, out.count("\n")) == (0, 1), err
    got = json.loads(out, parse_constant=pytest.fail)
    assert list(got) == ["rows", "knees"]
    rows: list[dict[str, Any]] = got["rows"]
    return rows


def counts_profile(ran_folder: Path, layers: dict[str, list[int]], name: str = "set", **changes: Any) -> str:
    body = {"model": "tiny", "fingerprint": "f1", "n_expert": 4, "top_k": 2, "counts": layers}
    body["tokens"] = sum(next(iter(layers.values()))) // 2
    (ran_folder / "counts").write_text(json.dumps({**body, **changes}))
    command = ["import", "counts", "--from", "counts-json", "--workload", name, "-o", f"{name}.json", "--force"]
    assert run_command(main_group, NAME, command) == 0
    return f"{name}.json"


def simulate_in(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `simulate` in a folder of its own: exit status, stdout, stderr."""
    monkeypatch.chdir(folder)

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = run_command(main_group, NAME, [str(a) for a in arguments])
        return (status, *capsys.readouterr())

    return lambda *arguments: run("simulate", *arguments)
