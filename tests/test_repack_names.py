"""Names and paths that a user may give to bel-repack, and texts that a stranger's model may hold."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

import synth
from faults import real, run_cli, tree
from repack_answers import answer, ple_model, write_set


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("m.gguf", "m"),
        ("no-extension", "no-extension"),
        ("m.v2.Q4_K_M.gguf", "m.v2.Q4_K_M"),
        ("m.GGUF", "m.GGUF"),
        (".gguf", ".gguf"),
        ("-leading-dash.gguf", "-leading-dash"),
        ("--json", "--json"),
        ("convert", "convert"),
        ("with space.gguf", "with space"),
        ("line\nend.gguf", "line\nend"),
        ("esc\x1b[31m.gguf", "esc\x1b[31m"),
        ("ünïcödé 模型.gguf", "ünïcödé 模型"),
        (os.fsdecode(b"not-utf8-\xff\xfe.gguf"), os.fsdecode(b"not-utf8-\xff\xfe")),
        ("manifest.json", "manifest.json"),
        ("m-00001-of-00001.gguf", "m"),
        ("x" * 200 + ".gguf", "x" * 200),
    ],
)
def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, base: str) -> None:
    """The default output stands beside the model, relative path or not, and every command takes its odd name."""
    monkeypatch.chdir(tmp_path)
    synth.moe().write(tmp_path / name)
    original = (tmp_path / name).read_bytes()
    done = answer(run_cli("--json", "--", name))
    bundle = tmp_path / f"{base}.bel"
    assert Path(done["bundle"]) == bundle
    assert done["model"]["sources"][0]["name"] == name
    assert {p.name for p in bundle.iterdir()} == {
        "manifest.json",
        "source",
        f"{base}-dense.gguf",
        f"{base}-experts.bin",
        f"{base}-experts.idx",
    }
    for args in (["inspect", "--", name], ["inspect", bundle], ["verify", bundle, "--source", tmp_path / name]):
        outcome = run_cli(*args)
        assert outcome.status == 0, outcome
        outcome.stdout.encode()
        assert "\x1b" not in outcome.stdout + outcome.stderr
    assert run_cli("restore", bundle, "-o", "back").status == 0
    assert (tmp_path / "back" / name).read_bytes() == original
    shutil.rmtree(bundle)
    table = run_cli("--", name)
    assert table.status == 0
    table.stdout.encode()


@pytest.mark.parametrize("name", ["esc\x1b[2J", "line\nend", "bell\x07", os.fsdecode(b"\xff")])
def test_texts_from_a_file_never_reach_the_terminal_raw(tmp_path: Path, name: str) -> None:
    """A model from a stranger must not move the cursor, forge a line of the answer, or stop it with an encoding error."""
    raw = os.fsencode(name)
    entries = [
        synth.key("general.architecture", synth.STRING, raw),
        synth.key("general.name", synth.STRING, raw * 200),
        synth.key(raw + b".expert_count", synth.U32, 99),
        synth.key(raw + b".expert_used_count", synth.U32, 2),
    ]
    path = synth.moe(entries=entries).write(tmp_path / "m.gguf")
    dense = synth.moe(entries=entries, tensors=[synth.Tensor(name, (32,), synth.F32)]).write(tmp_path / "d.gguf")
    for outcome in (real("inspect", path), real(path), real("inspect", path.with_name("m.bel")), real("inspect", dense)):
        assert outcome.status in (0, 3), outcome
        assert "Traceback" not in outcome.stderr
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", outcome.stdout + outcome.stderr)
        assert not re.search(r"^end", outcome.stdout + outcome.stderr, re.M)


def test_any_shard_names_the_set(tmp_path: Path) -> None:
    shards = write_set(tmp_path, synth.moe(), [4, 0, 8], "big.Q8_0")
    for shard in shards:
        done = answer(run_cli(shard, "--json", "--force"))
        assert Path(done["bundle"]) == tmp_path / "big.Q8_0.bel"
        assert [s["name"] for s in done["model"]["sources"]] == [s.name for s in shards]
        assert answer(run_cli("inspect", shard, "--json"))["model"]["sources"][1]["bytes"] == shards[1].stat().st_size


def test_a_model_behind_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a Hugging Face cache: the links have the names, and the output stands beside the link."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number, shard in enumerate(write_set(tmp_path / "blobs", synth.moe(), [6, 6])):
        shard.rename(tmp_path / "blobs" / f"blob{number}")
        (tmp_path / "snapshot" / shard.name).symlink_to(f"../blobs/blob{number}")
    (tmp_path / "short").symlink_to(tmp_path / "snapshot", target_is_directory=True)
    monkeypatch.chdir(tmp_path / "snapshot")
    named = tmp_path / "short" / "model-00002-of-00002.gguf"
    assert run_cli(named).status == 0
    assert (tmp_path / "snapshot" / "model.bel" / "manifest.json").is_file()
    assert run_cli("model-00001-of-00002.gguf", "-o", "again.bel").status == 0
    assert tree(tmp_path / "snapshot" / "again.bel") == tree(tmp_path / "snapshot" / "model.bel")


def test_dots_behind_a_link_lead_where_the_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk" / "models").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "models").symlink_to(tmp_path / "disk" / "models", target_is_directory=True)
    synth.moe().write(tmp_path / "disk" / "m.gguf")
    monkeypatch.chdir(tmp_path / "home")
    assert run_cli("models/../m.gguf").status == 0
    assert (tmp_path / "disk" / "m.bel").is_dir(), "beside the model"


def test_no_file_of_a_bundle_holds_a_path_of_this_machine(tmp_path: Path) -> None:
    folder = tmp_path / "a-telling-folder-name"
    folder.mkdir()
    path = ple_model().write(folder / "m.gguf")
    assert run_cli(path).status == 0
    for file in (folder / "m.bel").rglob("*"):
        assert b"telling" not in os.fsencode(file.name)
        assert file.is_dir() or b"telling" not in file.read_bytes(), file
