"""Faults that a sceptical user found with the README alone: each as a test of its kind."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import synth
from bel.formats.bundle import open_bundle
from bel.formats.errors import DamagedBundleError
from bel.formats.manifest import encode
from faults import COMMAND, run_cli, tree


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return synth.moe().write(tmp_path / "m.gguf")


@pytest.fixture
def bundle(tmp_path: Path, model: Path) -> Path:
    assert run_cli(model).status == 0
    return tmp_path / "m.bel"


def test_source_and_quick_together_read_every_byte(model: Path, bundle: Path) -> None:
    """A sample must never lead to the word 'equal': the user may delete the original on the strength of it."""
    layer = open_bundle(bundle).manifest.layers[0]
    path = bundle / "m-experts.bin"
    for expert in range(layer.n_expert):
        data = bytearray(path.read_bytes())
        data[layer.part_offset(expert, layer.parts[1]) + 5] ^= 1
        path.write_bytes(data)
        outcome = run_cli("verify", bundle, "--quick", "--source", model)
        assert outcome.status == 4
        assert f"layer 0 expert {expert} part up" in outcome.stderr
        data[layer.part_offset(expert, layer.parts[1]) + 5] ^= 1
        path.write_bytes(data)
    done = run_cli("verify", bundle, "--quick", "--source", model)
    assert done.status == 0
    assert "every byte" in done.stdout
    assert "--quick has no effect" in done.stderr


def test_force_does_not_replace_a_file(tmp_path: Path, model: Path) -> None:
    other = synth.moe(seed=1).write(tmp_path / "other.gguf")
    before = tree(tmp_path)
    outcome = run_cli(model, "-o", other, "--force")
    assert outcome.status == 2
    assert "not a bundle" in outcome.stderr
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["another-model.gguf", "notes.txt", "inner.bel/manifest.json", "source/thesis.txt"])
def test_force_does_not_replace_a_bundle_with_something_else_in_it(model: Path, bundle: Path, name: str) -> None:
    (bundle / name).parent.mkdir(exist_ok=True)
    (bundle / name).write_text("mine")
    before = tree(bundle)
    outcome = run_cli(model, "--force")
    assert outcome.status == 2
    assert name.split("/")[0] in outcome.stderr
    assert tree(bundle) == before


def test_a_write_protected_bundle_is_replaced_without_leftovers(tmp_path: Path, model: Path, bundle: Path) -> None:
    """Run without root's right to write anywhere, as users run it."""
    for path in [*bundle.rglob("*"), bundle]:
        path.chmod(path.stat().st_mode & ~0o222)
    drop = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"] if os.geteuid() == 0 else []
    done = subprocess.run([*drop, COMMAND, model, "--force"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert done.stderr == ""
    assert {p.name for p in tmp_path.iterdir()} == {"m.gguf", "m.bel"}


def test_a_file_without_permission_is_an_error_of_the_machine(model: Path) -> None:
    model.chmod(0)
    drop = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"] if os.geteuid() == 0 else []
    for args in ([model], ["inspect", model]):
        done = subprocess.run([*drop, COMMAND, *args], capture_output=True, text=True, check=False)
        assert done.returncode == 5, done
        assert str(model) in done.stderr
        assert "permission" in done.stderr.lower()


def test_inspect_does_not_pretend_to_digest_a_bundle(bundle: Path) -> None:
    outcome = run_cli("inspect", bundle, "--digest")
    assert outcome.status == 2
    assert "verify" in outcome.stderr


def test_inspect_digest_shows_the_sha256(model: Path) -> None:
    text = run_cli("inspect", model, "--digest").stdout
    sums = json.loads(run_cli("inspect", model, "--digest", "--json").stdout)["model"]["sources"]
    assert sums[0]["sha256"] in text


@pytest.mark.parametrize("where", [("-o", "/nonexistent/x.bel"), ()])
def test_a_dry_run_refuses_what_the_run_would_refuse(model: Path, bundle: Path, where: tuple[str, ...]) -> None:
    assert bundle.exists()
    outcome = run_cli(model, "--dry-run", *where)
    assert outcome.status == 2
    assert outcome.stdout == ""


def test_a_bundle_given_as_a_model_is_called_one(bundle: Path) -> None:
    outcome = run_cli(bundle)
    assert outcome.status == 3
    assert "bundle" in outcome.stderr


def test_names_from_a_bundle_are_escaped_on_a_terminal(tmp_path: Path) -> None:
    path = synth.moe().write(tmp_path / "a\x1b[31m\nb.gguf")
    assert run_cli(path).status == 0
    outcome = run_cli("restore", tmp_path / "a\x1b[31m\nb.bel", "-o", tmp_path / "back")
    assert outcome.status == 0
    assert "\x1b" not in outcome.stdout
    assert "\\x1b[31m\\nb.gguf" in outcome.stdout


@pytest.mark.parametrize("name", ["blk.0.ffn_zap_exps.weight", "blk.00.ffn_up_exps.weight", "dec.blk.0.ffn_up_exps.weight"])
def test_a_stack_that_is_only_named_like_experts_is_said(tmp_path: Path, name: str) -> None:
    model = synth.moe()
    model.tensors.append(synth.Tensor(name, (32, 64, 4)))
    outcome = run_cli(model.write(tmp_path / "m.gguf"))
    assert outcome.status == 0
    assert name in outcome.stderr


def test_experts_of_an_unknown_type_are_warned_about(tmp_path: Path) -> None:
    model = synth.moe()
    model.tensors[5] = synth.Tensor("blk.0.ffn_down_exps.weight", (64, 32, 4), 77, bytes(4008))
    outcome = run_cli(model.write(tmp_path / "m.gguf"))
    assert outcome.status == 0
    assert "cut wrongly" in outcome.stderr


def test_many_problems_are_cut_short_for_a_person(tmp_path: Path) -> None:
    tensors = [t for layer in range(8) for t in synth.expert_stacks(layer, 16)]
    for seed in (0, 1):
        synth.Gguf(synth.moe_entries(layers=8, experts=16), tensors, seed=seed).write(tmp_path / f"m{seed}.gguf")
        assert run_cli(tmp_path / f"m{seed}.gguf").status == 0
    other = (tmp_path / "m1.bel" / "m1-experts.bin").read_bytes()
    (tmp_path / "m0.bel" / "m0-experts.bin").write_bytes(other)
    outcome = run_cli("verify", tmp_path / "m0.bel", "--json")
    assert outcome.status == 4
    assert len(outcome.stderr.splitlines()) < 30
    problems = json.loads(outcome.stdout)["problems"]
    assert 100 < len(problems) <= 201
    assert f"{8 * 16 * 3 + 1} problem(s)" in outcome.stderr, "every part and the header page"


@pytest.mark.parametrize("fault", ["roles swapped", "more used than there are", "no sha256"])
def test_a_signed_manifest_that_cannot_be_right_is_refused(bundle: Path, fault: str) -> None:
    from dataclasses import replace

    manifest = open_bundle(bundle).manifest
    first, *rest = manifest.layers
    if fault == "roles swapped":
        gate, up, down = first.parts
        first = replace(first, parts=(replace(gate, role="up"), replace(up, role="gate"), down))
    elif fault == "more used than there are":
        first = replace(first, n_used=1000)
    sources = manifest.sources
    if fault == "no sha256":
        sources = tuple(replace(s, sha256=None) for s in sources)
    (bundle / "manifest.json").write_bytes(encode(replace(manifest, layers=(first, *rest), sources=sources)))
    with pytest.raises(DamagedBundleError):
        open_bundle(bundle)
