"""What bel-repack prints with --json: the same facts from every command, and nothing else on stdout."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import synth
from faults import run_cli
from repack_answers import answer, assert_error, ple_model, write_set
from repack_answers import model as model

MODEL_KEYS = {
    "model",
    "moe_layers",
    "mtp_layers",
    "n_experts_by_layer",
    "n_expert_used_by_layer",
    "routed_expert_tensors",
    "expert_stride_bytes",
    "dense_bytes",
    "experts_bytes",
    "ple_bytes",
    "padding_bytes",
    "token_cycle_bytes",
    "content_digest",
}
RUN_KEYS = {"bundle", "seconds", "bytes_read", "bytes_written", "peak_rss_bytes"}


def numbers(value: Any) -> list[float]:
    """All numbers in a JSON value."""
    if isinstance(value, dict | list):
        return [n for v in (value.values() if isinstance(value, dict) else value) for n in numbers(v)]
    return [value] if isinstance(value, int | float) else []


def test_json_of_the_conversion(tmp_path: Path) -> None:
    shards = write_set(tmp_path, ple_model(), [6, 7])
    done = answer(run_cli(shards[0], "--json"))
    assert set(done) >= MODEL_KEYS | RUN_KEYS
    assert set(done["model"]) == {"name", "arch", "sources"}
    assert [set(s) for s in done["model"]["sources"]] == [{"name", "bytes", "sha256"}] * 2
    bundle = Path(done["bundle"])
    sizes = {p.name: p.stat().st_size for p in bundle.iterdir()}
    assert done["dense_bytes"] == sizes["model-dense.gguf"]
    assert done["ple_bytes"] == sizes["model-ple.gguf"]
    assert done["experts_bytes"] == sizes["model-experts.bin"]
    assert (done["moe_layers"], done["mtp_layers"]) == ([0, 1], [])
    assert done["n_experts_by_layer"] == {"0": 4, "1": 4}
    assert done["n_expert_used_by_layer"] == {"0": 2, "1": 2}
    assert done["expert_stride_bytes"] == {"0": 8192, "1": 8192}
    assert done["token_cycle_bytes"] == 2 * 2 * 8192
    assert done["padding_bytes"] == 4096 + 8 * (8192 - 3 * 2176)
    assert done["routed_expert_tensors"] == [f"blk.{b}.ffn_{r}_exps.weight" for b in (0, 1) for r in ("gate", "up", "down")]
    assert done["bytes_read"] == sum(s.stat().st_size for s in shards)
    assert done["bytes_written"] >= done["bytes_read"]
    assert all(math.isfinite(n) and n >= 0 for n in numbers(done))
    summed = subprocess.run(["sha256sum", *shards], capture_output=True, text=True, check=True).stdout
    assert [s["sha256"] for s in done["model"]["sources"]] == [line.split()[0] for line in summed.splitlines()]
    shown = answer(run_cli("inspect", bundle, "--json"))
    assert {k: shown[k] for k in MODEL_KEYS} == {k: done[k] for k in MODEL_KEYS}


def test_json_of_inspect(tmp_path: Path) -> None:
    model = synth.moe().write(tmp_path / "m.gguf")
    (tmp_path / "set").mkdir()
    shards = write_set(tmp_path / "set", synth.moe(), [5, 7])
    one, many = answer(run_cli("inspect", model, "--json")), answer(run_cli("inspect", shards[1], "--json"))
    assert set(one) >= MODEL_KEYS
    assert one["content_digest"] is None
    digests = {answer(run_cli("inspect", p, "--json", "--digest"))["content_digest"] for p in (model, *shards)}
    for source in (model, shards[0]):
        assert run_cli(source).status == 0
    for bundle in (tmp_path / "m.bel", tmp_path / "set" / "model.bel"):
        digests.add(answer(run_cli("inspect", bundle, "--json"))["content_digest"])
    assert len(digests) == 1, "file, split set and their bundles are one model"
    assert re.fullmatch("[0-9a-f]{64}", digests.pop())
    for key in MODEL_KEYS - {"model", "dense_bytes"}:
        assert one[key] == many[key], key
    other = answer(run_cli("inspect", synth.moe(seed=1).write(tmp_path / "o.gguf"), "--json", "--digest"))
    assert other["content_digest"] != answer(run_cli("inspect", tmp_path / "m.bel", "--json"))["content_digest"]


def test_inspect_says_of_a_gguf_what_its_bundle_holds(tmp_path: Path) -> None:
    path = ple_model().write(tmp_path / "m.gguf")
    before, dry = answer(run_cli("inspect", path, "--json")), answer(run_cli(path, "--dry-run", "--json"))
    done = answer(run_cli(path, "--json"))
    for key in MODEL_KEYS - {"model", "content_digest"}:
        assert before[key] == dry[key] == done[key], key


def test_json_of_verify_and_restore(model: Path, tmp_path: Path) -> None:
    assert run_cli(model).status == 0
    bundle = tmp_path / "m.bel"
    checked = answer(run_cli("verify", bundle, "--json"))
    assert set(checked) == {"ok", "blobs_checked", "bytes_checked", "problems"}
    assert (checked["ok"], checked["blobs_checked"], checked["problems"]) == (True, 8, [])
    sizes = sum(p.stat().st_size for p in bundle.rglob("*") if p.is_file() and p.name != "manifest.json")
    assert checked["bytes_checked"] == sizes
    restored = answer(run_cli("restore", bundle, "-o", tmp_path / "back", "--json"))
    assert restored == {"files": [{"name": "m.gguf", "bytes": model.stat().st_size, "sha256": restored["files"][0]["sha256"]}]}
    summed = subprocess.run(["sha256sum", model], capture_output=True, text=True, check=True).stdout
    assert restored["files"][0]["sha256"] == summed.split()[0]


def test_json_of_a_failed_verify_is_printed_too(model: Path, tmp_path: Path) -> None:
    assert run_cli(model).status == 0
    os.truncate(tmp_path / "m.bel" / "m-experts.bin", 4096)
    outcome = run_cli("verify", tmp_path / "m.bel", "--json")
    assert outcome.status == 4
    told = json.loads(outcome.stdout)
    assert told["ok"] is False
    assert "truncated" in told["problems"][0]
    (tmp_path / "m.bel" / "manifest.json").write_text("{")
    outcome = run_cli("verify", tmp_path / "m.bel", "--json")
    assert outcome.status == 4
    assert json.loads(outcome.stdout)["ok"] is False


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_errors_leave_stdout_empty(model: Path, tmp_path: Path, flags: list[str]) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    assert_error(run_cli(tmp_path / "bad.gguf", *flags), 3, "bad.gguf")
    assert_error(run_cli("inspect", tmp_path / "bad.gguf", *flags), 3, "bad.gguf")
    assert run_cli(model).status == 0
    assert_error(run_cli(model, *flags), 2, "m.bel")
    os.truncate(tmp_path / "m.bel" / "m-experts.bin", 4096)
    assert_error(run_cli("restore", tmp_path / "m.bel", "-o", tmp_path / "back", *flags), 4, "m-experts.bin")
    assert_error(run_cli("inspect", tmp_path / "m.bel", *flags), 4, "m-experts.bin")


def test_a_model_without_top_k_has_null_in_its_place(tmp_path: Path) -> None:
    entries = [synth.key("general.architecture", synth.STRING, "qwen3moe")]
    path = synth.moe(entries=entries).write(tmp_path / "m.gguf")
    done = run_cli(path, "--json")
    told = answer(done)
    assert told["token_cycle_bytes"] is None
    assert told["n_expert_used_by_layer"] == {"0": None, "1": None}
    assert told["model"]["name"] is None
    assert "expert_used_count" in done.stderr
    assert run_cli("inspect", path).status == 0
    assert run_cli("inspect", path.with_name("m.bel")).status == 0
