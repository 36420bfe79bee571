"""Manifests that are edited and signed again: refused, or the right bytes; never a wrong file."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.bundle import open_bundle
from bel.formats.digest import bytes_digest
from bel.formats.errors import DamagedBundleError
from bel.formats.manifest import decode
from damaged import PAGE, Made, copied, make
from faults import run_cli, tree
from forged import Edit, drop, put, rewrite


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("damage"))


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Made:
    return copied(made, tmp_path / "m.bel")


def test_the_helper_makes_manifests_that_are_read(copy: Made) -> None:
    rewrite(copy.folder, lambda _body: None)
    assert run_cli("verify", copy.folder).status == 0
    assert copy.restore()[0].status == 0


PART = ("layers", "0", "parts")
BAD_NAMES = ["../x", "/etc/x", "a/b", "..", ".", "", "x\0y", "manifest.json"]
BAD_NUMBERS: list[object] = [-1, 2**63, 2**200, 1.5, "1", None, True, [], {}]
REFUSED: dict[str, Edit] = {
    "version 2": put("version", value=2),
    "version text": put("version", value="1"),
    "no version": drop("version"),
    "format": put("format", value="other"),
    "no sources": put("sources", value=[]),
    "no layers": put("layers", value={}),
    "layers a list": put("layers", value=[]),
    "tensors a map": put("tensors", value={}),
    "a tensor is null": put("tensors", 0, value=None),
    "files null": put("files", value=None),
    "model null": put("model", value=None),
    "arch a number": put("model", "arch", value=7),
    "content digest short": put("content_digest", value="ab"),
    "content digest upper case": put("content_digest", value="A" * 64),
    "digest with a line end": put("tensors", 0, "digest", value="a" * 64 + "\n"),
    "layer key text": lambda b: b["layers"].update(x=b["layers"].pop("0")),
    "layer key huge": lambda b: b["layers"].update({"9" * 5000: b["layers"].pop("1")}),
    "layers out of order": lambda b: b["layers"].update({"0": b["layers"].pop("0")}),
    "two tensors with one place": lambda b: b["tensors"][1].update(source_offset=b["tensors"][2]["source_offset"]),
    "kept over a tensor": put("sources", 0, "kept", 0, 1, value=10**4),
    "kept behind the end": put("sources", 1, "kept", value=[[0, 64], [2**62, 64]]),
    "kept of one number": put("sources", 0, "kept", value=[[0]]),
    "kept of text": put("sources", 0, "kept", value=["00"]),
    "two sources with one name": lambda b: b["sources"][1].update(name=b["sources"][0]["name"]),
    "two files with one name": lambda b: b["files"]["ple"].update(name=b["files"]["dense"]["name"]),
    "header file elsewhere": put("sources", 0, "header_file", value="../../etc/passwd"),
    "header file in no folder": put("sources", 0, "header_file", value="x.hdr.zst"),
    "header file above": put("sources", 0, "header_file", value="source/../manifest.json"),
    "a part of another tensor": put(*PART, 0, "tensor", value=10**9),
    "a part twice": lambda b: b["layers"]["0"]["parts"].append(b["layers"]["0"]["parts"][0]),
    "parts overlap": put(*PART, 1, "offset", value=0),
    "a part outside its blob": put(*PART, 2, "offset", value=8192),
    "a part not aligned": put(*PART, 0, "offset", value=1),
    "a part of another role": put(*PART, 0, "role", value="router"),
    "no parts": put(*PART, value=[]),
    "a part too large": put(*PART, 0, "bytes", value=2**40),
    "stride not aligned": put("layers", "0", "stride", value=8200),
    "stride 0": put("layers", "0", "stride", value=0),
    "offset 0": put("layers", "0", "offset", value=0),
    "offset behind the end": put("layers", "0", "offset", value=2**40),
    "n_expert huge": put("layers", "0", "n_expert", value=2**62),
    "n_expert 0": put("layers", "0", "n_expert", value=0),
    "shard of no file": put("layers", "0", "shard", value=2),
    "dest elsewhere": put("tensors", 0, "dest", value="../x"),
    "dest offset huge": put("tensors", 0, "dest_offset", value=2**62),
    "dest experts of a dense tensor": put("tensors", 1, "dest", value="experts"),
    "source of no file": put("tensors", 0, "source", value=2),
    "five dimensions": put("tensors", 0, "ne", value=[1] * 5),
    "ne negative": put("tensors", 0, "ne", value=[-1]),
    "ple without a file": put("files", "ple", value=None),
    "digest longer than its file": put("files", "dense", "digest_bytes", value=2**40),
    **{f"source name {n!r}": put("sources", 0, "name", value=n) for n in BAD_NAMES if n != "manifest.json"},
    **{f"dense name {n!r}": put("files", "dense", "name", value=n) for n in BAD_NAMES},
    **{f"source bytes {v!r:.20}": put("sources", 0, "bytes", value=v) for v in BAD_NUMBERS},
    **{f"tensor bytes {v!r:.20}": put("tensors", 3, "bytes", value=v) for v in BAD_NUMBERS},
    **{f"stride {v!r:.20}": put("layers", "1", "stride", value=v) for v in BAD_NUMBERS},
    **{f"n_expert {v!r:.20}": put("layers", "1", "n_expert", value=v) for v in BAD_NUMBERS},
    **{f"kept {v!r:.20}": put("sources", 0, "kept", 0, 1, value=v) for v in BAD_NUMBERS},
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_a_hostile_manifest_is_refused(copy: Made, what: str) -> None:
    before = tree(copy.folder.parent)
    rewrite(copy.folder, REFUSED[what])
    path = copy.folder / "manifest.json"
    with pytest.raises(DamagedBundleError) as caught:
        decode(path.read_bytes(), str(path))
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 700, "a message is for reading"
    for args in (
        ("verify", copy.folder),
        ("inspect", copy.folder),
        ("restore", copy.folder, "-o", copy.folder.parent / "back"),
    ):
        outcome = run_cli(*args)
        assert outcome.status == 4, (args, outcome)
        assert str(path) in outcome.stderr
        assert "Traceback" not in outcome.stderr
    after = tree(copy.folder.parent)
    assert {k: v for k, v in after.items() if not k.endswith("manifest.json")} == {
        k: v for k, v in before.items() if not k.endswith("manifest.json")
    }


def paths_of(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from paths_of(inner, (*at, key))


def test_any_key_may_be_missing_or_of_another_type(made: Made) -> None:
    """DamagedBundleError or, where the value does not matter, a manifest; never another exception."""
    good = json.loads((made.folder / "manifest.json").read_bytes())
    chance = random.Random(3)
    places = [p for p in paths_of(good) if p != ("digest",)]
    for keys in places:
        values: tuple[object, ...] = (None, -1, 2**64, 0.5, "", [], {}, True, {"a": 1}, chance.randrange(2**40))
        for value in values:
            body = json.loads(json.dumps(good))
            (drop(*keys) if value is None else put(*keys, value=value))(body)
            body["digest"] = "0" * 64
            text = json.dumps(body)
            data = text.replace(f'"digest": "{"0" * 64}"', f'"digest": "{bytes_digest(text.encode())}"', 1).encode()
            try:
                decode(data, "manifest.json")
            except DamagedBundleError as error:
                assert "manifest.json" in str(error)


@settings(max_examples=80)
@given(data=st.data())
def test_a_forged_manifest_never_makes_a_wrong_file(
    made: Made, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any number changed and signed again: commands end with 0 or 4, and what a restore leaves is the original or nothing."""
    folder = tmp_path_factory.mktemp("forged")
    shutil.copytree(made.folder, folder / "m.bel")
    good = json.loads((folder / "m.bel" / "manifest.json").read_bytes())
    numbers = [p for p in paths_of(good) if p[0] in ("layers", "tensors", "files", "sources") and type(_at(good, p)) is int]
    keys = data.draw(st.sampled_from(numbers))
    old = _at(good, keys)
    value = data.draw(st.sampled_from([0, 1, old + 1, max(0, old - 1), old * 2, old + 64, old + PAGE, max(0, old - 64)]))
    rewrite(folder / "m.bel", put(*keys, value=value))
    checked = run_cli("verify", folder / "m.bel")
    restored = run_cli("restore", folder / "m.bel", "-o", folder / "back")
    for outcome in (checked, restored):
        assert outcome.status in (0, 4), (keys, value, outcome)
        assert "Traceback" not in outcome.stderr, (keys, value, outcome)
    if restored.status == 0:
        assert tree(folder / "back") == tree(made.inputs), (keys, value)
    else:
        assert not (folder / "back").exists()
    shutil.rmtree(folder)


def _at(body: Any, keys: tuple[str | int, ...]) -> Any:
    for key in keys:
        body = body[key]
    return body


def overlapping_dense(body: dict[str, Any]) -> None:
    a, b = [t for t in body["tensors"] if t["dest"] == "dense"][1:3]
    b["dest_offset"] = a["dest_offset"]


def tensor_in_the_header(body: dict[str, Any]) -> None:
    next(t for t in body["tensors"] if t["dest"] == "dense")["dest_offset"] = 0


def overlapping_layers(body: dict[str, Any]) -> None:
    body["layers"]["1"].update(shard=0, offset=body["layers"]["0"]["offset"])


def longer_than_its_layers(body: dict[str, Any]) -> None:
    body["files"]["experts"][0]["bytes"] += PAGE


@pytest.mark.parametrize(
    "edit",
    [
        overlapping_dense,
        tensor_in_the_header,
        overlapping_layers,
        longer_than_its_layers,
    ],
)
def test_places_in_the_bundle_that_overlap_or_leave_a_hole_are_damage(copy: Made, edit: Edit) -> None:
    """Whatever else is wrong with it then: each command says so, and names a file."""
    rewrite(copy.folder, edit)
    if edit is longer_than_its_layers:
        path = copy.folder / copy.manifest.experts[0].name
        os.truncate(path, path.stat().st_size + PAGE)
    for args in (("verify", copy.folder), ("restore", copy.folder, "-o", copy.folder.parent / "back")):
        outcome = run_cli(*args)
        assert outcome.status == 4, (args, outcome)
        assert str(copy.folder) in outcome.stderr.splitlines()[0], outcome.stderr
    assert not (copy.folder.parent / "back").exists()


@pytest.mark.parametrize("edit", [overlapping_dense, tensor_in_the_header, overlapping_layers, longer_than_its_layers])
def test_a_bundle_with_impossible_places_does_not_open(copy: Made, edit: Edit) -> None:
    """SPEC.md: every place lies inside its file; its docstring: every byte of a destination has one owner."""
    rewrite(copy.folder, edit)
    with pytest.raises(DamagedBundleError):
        open_bundle(copy.folder)
