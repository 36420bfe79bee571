"""What `bel-profile fit` answers on a command line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bel.formats.console import run_command
from bel.profiler.fit_cli import fit_command

JSON_KEYS = {
    "vram_bytes",
    "ram_bytes",
    "dense_bytes",
    "kv_bytes",
    "compute_bytes",
    "slots_total",
    "slots_per_layer",
    "resident_fraction",
    "verdict",
    "advice",
}


def run_fit(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = run_command(fit_command, "bel-profile", [str(a) for a in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def fit_answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[dict[str, Any], str]:
    status, out, err = run_fit(capsys, *arguments, "--json")
    assert status == 0, err
    answer = json.loads(out)
    assert answer.keys() >= JSON_KEYS
    return answer, err
