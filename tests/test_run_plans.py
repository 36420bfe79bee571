"""What `bel-run` gives the experts: slots from memory that is promised or free, or from a plan of this model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bel.formats.bundle import Bundle, open_bundle
from bel.formats.fingerprint import fingerprint
from bel.formats.plan import COLUMNS, MISSES, Plan, PlanLayer, PlanWork, Prediction
from bel.formats.plan_json import encode_plan
from bel.runtime import running
from run_answers import PROMPT, Run, ended, process
from run_answers import model as model
from run_answers import run as run
from run_answers import stock as stock


def test_too_little_memory_names_what_would_do_and_that_does(model: Path) -> None:
    done = ended(process(model, "-p", "hi", "--ram", "20M"))
    assert done.status == 2
    named = re.search(r"Give --ram (\d+M) or more", done.stderr)
    assert named, done.stderr
    answer = ended(process(model, "-p", "hi", "-n", 4, "--ram", named[1], "--json")).json
    memory = answer["load"]["memory"]
    assert memory["total_bytes"] <= memory["promised_bytes"] == int(named[1][:-1]) << 20
    assert answer["peak_rss_bytes"] <= memory["promised_bytes"]


def test_without_a_budget_what_is_free_is_taken_and_said(run: Run, model: Path) -> None:
    done = run(model, "-p", "hi", "-n", 2)
    assert "32/32/32 of 32: 192 of 192 experts (100 %)" in done.stderr
    assert "that is free now" in done.stderr


def test_too_little_free_memory_says_that_nobody_asked_for_it(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "spare_bytes", lambda: 1 << 20)
    done = run(model, "-p", "hi", "-n", 2)
    assert done.status == 2
    assert "no --ram was given, and this is what is free here" in done.stderr


@pytest.mark.parametrize("free_mib", [0, 1, 64, 96, 300, 4096, 65536])
def test_the_reserve_leaves_most_of_what_is_free(free_mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In small containers too; in large ones at least 256 MiB stay for others."""
    monkeypatch.setattr(running, "free_bytes", lambda: free_mib << 20)
    monkeypatch.setattr(running, "rss_bytes", lambda: 0)
    spare = running.spare_bytes()
    assert 3 * (free_mib << 20) // 4 <= spare <= free_mib << 20
    assert free_mib < 1024 or (free_mib << 20) - spare >= 256 << 20


def test_a_static_set_without_a_plan_is_called_what_it_is(run: Run, model: Path, stock: Any) -> None:
    done = run(model, "-p", PROMPT, "-n", 8, "--policy", "static", "--json")
    assert done.json["cache"]["hits"] == 0
    assert done.json["tokens"] == stock["tokens"][:8]
    assert "there is no plan" in done.stderr


def _plan(bundle: Bundle, **changes: Any) -> Plan:
    """A plan with as many slots for layer L as its top-k and L more, of which the first two experts are preloaded."""
    reached = [x for x in bundle.manifest.layers if not x.is_mtp]
    layers = tuple(
        PlanLayer(x.layer, x.n_expert, x.n_used or 1, x.stride_bytes, (x.n_used or 1) + x.layer, (7, 3)) for x in reached
    )
    none = Prediction()
    values: dict[str, Any] = {
        "model_name": bundle.manifest.model_name or "",
        "arch": bundle.manifest.arch or "",
        "fingerprint": fingerprint(bundle),
        "objective": MISSES,
        "clock": None,
        "policy": "lru",
        "split": None,
        "budget_bytes": sum(x.slots * x.slot_bytes for x in layers),
        "layers": layers,
        "predicted": dict.fromkeys(COLUMNS, none),
        "workloads": (PlanWork("code", 1.0, none, none, none, none, None),),
        "profile_digests": (),
        "notes": (),
    }
    return Plan(**values | changes)


def test_a_plan_gives_each_layer_its_slots_and_its_first_experts(run: Run, model: Path, stock: Any, tmp_path: Path) -> None:
    bundle = open_bundle(model)
    (tmp_path / "plan.json").write_bytes(encode_plan(_plan(bundle)))
    answer = run(model, "-p", PROMPT, "-n", 24, "--plan", tmp_path / "plan.json", "--json").json
    assert answer["load"]["slots_by_layer"] == {str(layer): 4 + layer for layer in range(6)}
    assert answer["load"]["uploaded_bytes"] == 2 * sum(x.stride_bytes for x in bundle.manifest.layers)
    assert answer["tokens"] == stock["tokens"]


@pytest.mark.parametrize("case", ["fingerprint", "layers"])
def test_a_plan_of_another_model_is_refused(run: Run, model: Path, tmp_path: Path, case: str) -> None:
    right = _plan(open_bundle(model))
    fewer = {"layers": right.layers[:-1], "budget_bytes": right.slots_bytes}
    wrong = _plan(open_bundle(model), model_name="other", **({"fingerprint": "ab" * 32} if case == "fingerprint" else fewer))
    (tmp_path / "plan.json").write_bytes(encode_plan(wrong))
    done = run(model, "-p", "hi", "--plan", tmp_path / "plan.json")
    assert done.status == 3
    for word in ("plan of another model", case, "'other'", "tiny.bel", "plan.json"):
        assert word in done.stderr, word
