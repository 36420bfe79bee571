"""A bundle that is not as it was written, by accident or on purpose: found, named, and never restored from."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import synth
from bel.formats.bundle import open_bundle
from bel.formats.digest import bytes_digest
from bel.formats.errors import DamagedBundleError
from bel.formats.manifest import DENSE, Manifest, decode
from faults import Outcome, real, run_cli, tree

PAGE = 4096


def model(seed: int) -> synth.Gguf:
    """Every kind of file: a PLE table, blobs with padding, dirty gaps in the source, a dense file with padding."""
    table = synth.Tensor("per_layer_token_embd.weight", (64, 8), synth.Q8_0, gap_bytes=64)
    odd = synth.Tensor("odd.bias", (5,), synth.F32)
    return synth.moe(tensors=[table, odd, *synth.moe_tensors()], seed=seed, pad_byte=7, tail=b"tail")


@dataclass(frozen=True)
class Made:
    """A bundle, the folder of its source, and where the source is restored in vain."""

    folder: Path
    inputs: Path
    manifest: Manifest

    def restore(self, bundle: Path | None = None) -> tuple[Outcome, Path]:
        """Restore into a folder that does not exist yet."""
        back = self.folder.parent / "back"
        if back.exists():
            shutil.rmtree(back)
        return run_cli("restore", bundle or self.folder, "-o", back), back


def make(folder: Path, seed: int = 0) -> Made:
    """Convert one model, in two source files and two experts files."""
    inputs = folder / f"in{seed}"
    inputs.mkdir(parents=True)
    for name, shard in synth.split(model(seed), [7, 7]).items():
        shard.write(inputs / name)
    bundle = folder / f"m{seed}.bel"
    done = run_cli(inputs / "model-00001-of-00002.gguf", "-o", bundle, "--shard-size", "40000")
    assert done.status == 0, done
    return Made(bundle, inputs, open_bundle(bundle).manifest)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("damage"))


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A bundle of the same shape: only the tensors' values differ."""
    return make(tmp_path_factory.mktemp("twin"), seed=1)


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Made:
    shutil.copytree(made.folder, tmp_path / "m.bel")
    return Made(tmp_path / "m.bel", made.inputs, made.manifest)


def files_of(bundle: Path) -> list[Path]:
    """All files of a bundle."""
    return sorted(p for p in bundle.rglob("*") if p.is_file())


def flip(path: Path, at: int, bit: int) -> None:
    """Flip one bit in place."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


@dataclass(frozen=True)
class Place:
    """What a byte of a bundle is for: words that a report on it must have, and whether restoring depends on it."""

    words: tuple[str, ...]
    restores: bool


def place_of(manifest: Manifest, path: Path, at: int) -> Place:
    """What byte `at` of a file of a bundle belongs to, worked out from the manifest alone."""
    for shard, row in enumerate(manifest.experts):
        if row.name != path.name:
            continue
        if at < PAGE:
            return Place(("header page",), True)
        layer = next(x for x in manifest.layers if x.shard == shard and 0 <= at - x.offset_bytes < x.n_expert * x.stride_bytes)
        expert, inside = divmod(at - layer.offset_bytes, layer.stride_bytes)
        for part in layer.parts:
            if part.offset_bytes <= inside < part.offset_bytes + part.size_bytes:
                return Place((f"layer {layer.layer} ", f"expert {expert} ", f"part {part.role}"), True)
        return Place((f"layer {layer.layer} ", f"expert {expert} ", "padding"), False)
    for gguf, dest in ((manifest.dense, DENSE), (manifest.ple, "ple")):
        if gguf is None or gguf.name != path.name:
            continue
        if at < gguf.digest_bytes:
            return Place(("header",), False)
        for tensor in manifest.tensors:
            if tensor.dest == dest and tensor.dest_offset_bytes <= at < tensor.dest_offset_bytes + tensor.size_bytes:
                return Place((tensor.name,), True)
        return Place(("padding",), False)
    return Place((), True)


def assert_damage_is_found(made: Made, path: Path, at: int) -> None:
    """`verify` names the place and exits 4; `restore` refuses, or gives the right bytes where the place does not matter."""
    place = place_of(made.manifest, path, at)
    checked = run_cli("verify", made.folder, "--json")
    assert checked.status == 4, (path, at, checked)
    answer = json.loads(checked.stdout)
    assert answer["ok"] is False
    assert any(str(path) in p and all(w in p for w in place.words) for p in answer["problems"]), (path, at, place, answer)
    restored, back = made.restore()
    if place.restores:
        assert restored.status == 4, (path, at, restored)
        assert str(path) in restored.stderr, (path, restored.stderr)
        if path.suffix == ".bin":
            assert all(w in restored.stderr for w in place.words), (at, place, restored.stderr)
        assert not back.exists(), "no file, and not even its folder"
    else:
        assert restored.status == 0, (path, at, restored)
        assert tree(back) == tree(made.inputs)


def interesting(manifest: Manifest, bundle: Path) -> Iterator[tuple[str, Path, int]]:
    """The first and the last byte of everything that a bundle is made of."""
    for row in manifest.experts:
        path = bundle / row.name
        yield from (("magic", path, 0), ("file size field", path, 24), ("index digest", path, 63), ("header fill", path, 64))
        yield "header end", path, PAGE - 1
    for layer in manifest.layers:
        path = bundle / manifest.experts[layer.shard].name
        for expert in (0, layer.n_expert - 1):
            for part in layer.parts:
                start = layer.part_offset(expert, part)
                yield from (("part start", path, start), ("part end", path, start + part.size_bytes - 1))
            end = layer.offset_bytes + (expert + 1) * layer.stride_bytes
            used = layer.parts[-1].offset_bytes + layer.parts[-1].size_bytes
            yield from (("padding start", path, end - layer.stride_bytes + used), ("padding end", path, end - 1))
    for tensor in manifest.tensors:
        if tensor.dest != "experts":
            gguf = manifest.dense if tensor.dest == DENSE else manifest.ple
            assert gguf is not None
            yield from (
                (f"{tensor.dest} tensor start", bundle / gguf.name, tensor.dest_offset_bytes),
                (f"{tensor.dest} tensor end", bundle / gguf.name, tensor.dest_offset_bytes + tensor.size_bytes - 1),
            )
    for gguf in (manifest.dense, manifest.ple):
        assert gguf is not None
        yield from (("gguf magic", bundle / gguf.name, 0), ("gguf header end", bundle / gguf.name, gguf.digest_bytes - 1))
        yield "file end", bundle / gguf.name, gguf.size_bytes - 1
    for at in (0, 8, 12, 16, 23, 24, manifest.index.size_bytes - 1):
        yield "digest table", bundle / manifest.index.name, at
    for source in manifest.sources:
        for at in (0, 4, source.header_file_bytes // 2, source.header_file_bytes - 1):
            yield "kept header", bundle / source.header_file, at


def is_ple(path: Path) -> bool:
    return path.name.endswith("-ple.gguf")


def test_one_bit_at_either_end_of_everything(made: Made) -> None:
    for what, path, at in interesting(made.manifest, made.folder):
        bit = random.Random(f"{path.name} {at}").randrange(8)
        if is_ple(path) and place_of(made.manifest, path, at).restores:
            continue  # test_restore_names_the_ple_file
        flip(path, at, bit)
        try:
            assert_damage_is_found(made, path, at)
        except AssertionError as error:
            raise AssertionError(what) from error
        finally:
            flip(path, at, bit)
    assert run_cli("verify", made.folder).status == 0, "every flip was undone"


@settings(max_examples=150)
@given(which=st.integers(0, 10**6), share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_one_bit_anywhere(made: Made, which: int, share: float, bit: int) -> None:
    paths = [p for p in files_of(made.folder) if not is_ple(p)]
    path = paths[which % len(paths)]
    at = int(share * path.stat().st_size)
    flip(path, at, bit)
    try:
        assert_damage_is_found(made, path, at)
    finally:
        flip(path, at, bit)


def test_restore_names_the_ple_file(copy: Made) -> None:
    ple = copy.manifest.ple
    assert ple is not None
    path, at = copy.folder / ple.name, next(t.dest_offset_bytes for t in copy.manifest.tensors if t.dest == "ple")
    flip(path, at, 0)
    assert_damage_is_found(copy, path, at)


def test_every_byte_of_the_manifest(made: Made) -> None:
    """White space, key names and its own digest included."""
    path = made.folder / "manifest.json"
    good = path.read_bytes()
    decode(good, "manifest.json")
    chance = random.Random(2)
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << chance.randrange(8)
        with pytest.raises(DamagedBundleError, match=r"^manifest\.json: "):
            decode(bytes(bad), "manifest.json")


@settings(max_examples=60)
@given(which=st.integers(0, 10**6), share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_quick_never_takes_damage_for_a_traceback(made: Made, which: int, share: float, bit: int) -> None:
    """What `--quick` reads of this small bundle is everything but dense tensors and padding."""
    path = files_of(made.folder)[which % len(files_of(made.folder))]
    at = int(share * path.stat().st_size)
    place = place_of(made.manifest, path, at)
    flip(path, at, bit)
    try:
        checked = run_cli("verify", made.folder, "--quick")
        dense_bytes = path.suffix == ".gguf" and place.words != ("header",)
        assert checked.status == (0 if dense_bytes or place.words[-1:] == ("padding",) else 4), (path, at, checked)
    finally:
        flip(path, at, bit)


# Sizes


def _resize(by: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, max(0, path.stat().st_size + by))


def _extend_with_data(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def _zero_tail(path: Path) -> None:
    """As a file system leaves a file whose last pages were not flushed before a power loss: right size, zeros at the end."""
    size = path.stat().st_size
    tail = min(size, 512)
    with path.open("r+b") as file:
        file.seek(-tail, os.SEEK_END)
        if not file.read().strip(b"\0"):
            file.seek(0)  # padding: zero the whole file instead
            file.write(bytes(size))
            return
        file.seek(-tail, os.SEEK_END)
        file.write(bytes(tail))


SIZES = {
    "one byte less": _resize(-1),
    "one page less": _resize(-PAGE),
    "empty": _resize(-(10**9)),
    "one zero more": _resize(1),
    "one page more": _resize(PAGE),
    "data behind": _extend_with_data,
    "missing": Path.unlink,
}


@pytest.mark.parametrize("change", [*SIZES, "zero tail"])
def test_a_file_of_another_size_is_found_by_every_command(made: Made, tmp_path: Path, change: str) -> None:
    for name in [p.relative_to(made.folder) for p in files_of(made.folder)]:
        folder = tmp_path / "m.bel"
        shutil.copytree(made.folder, folder)
        SIZES.get(change, _zero_tail)(folder / name)
        commands: list[tuple[str | Path, ...]] = [("verify", folder), ("verify", folder, "--quick"), ("inspect", folder)]
        for args in commands:
            if change == "zero tail" and (args[-1] == "--quick" or args[0] == "inspect"):
                continue
            outcome = run_cli(*args)
            lost = change == "missing" and name.name == "manifest.json"  # inspect cannot tell such a folder from any other
            assert outcome.status == 4 or (lost and args[0] == "inspect" and outcome.status == 3), (name, args, outcome)
            assert str(folder / name) in outcome.stderr or lost, (name, outcome)
            assert "Traceback" not in outcome.stderr
        restored, back = made.restore(folder)
        needless = change == "zero tail" and restored.status == 0
        assert (needless and tree(back) == tree(made.inputs)) or (restored.status == 4 and not back.exists()), (name, restored)
        shutil.rmtree(folder)


def test_other_things_in_the_place_of_files(made: Made, tmp_path: Path) -> None:
    """A folder, a pipe, a broken link: said to be damage, without waiting for a writer."""
    for name in [p.relative_to(made.folder) for p in files_of(made.folder)]:
        for put in (os.mkdir, os.mkfifo, lambda p: os.symlink("/nonexistent", p)):
            folder = tmp_path / "m.bel"
            shutil.copytree(made.folder, folder)
            (folder / name).unlink()
            put(folder / name)
            for args in (("verify", folder), ("verify", folder, "--quick"), ("restore", folder, "-o", tmp_path / "back")):
                outcome = run_cli(*args)
                assert outcome.status in (3, 4), (name, args, outcome)
                assert "Traceback" not in outcome.stderr
            assert not (tmp_path / "back").exists()
            shutil.rmtree(folder)


def test_files_that_nobody_listed_are_ignored(copy: Made) -> None:
    (copy.folder / "profile.json").write_text("{}")
    (copy.folder / "README.md").write_text("a model card")
    assert run_cli("verify", copy.folder).status == 0
    assert copy.restore()[0].status == 0


# Swaps


SWAPS = [
    "experts-00001",
    "experts-00002",
    "experts.idx",
    "dense",
    "ple",
    "00001-of-00002.gguf.hdr",
    "00002-of-00002.gguf.hdr",
    "manifest",
]


@pytest.mark.parametrize("which", SWAPS)
def test_a_file_of_a_model_of_the_same_shape(copy: Made, twin: Made, which: str) -> None:
    name = next(p.relative_to(twin.folder) for p in files_of(twin.folder) if which in p.name)
    assert (copy.folder / name).stat().st_size == (twin.folder / name).stat().st_size or which.endswith("hdr")
    same = (copy.folder / name).read_bytes() == (twin.folder / name).read_bytes()
    shutil.copyfile(twin.folder / name, copy.folder / name)
    full, quick = run_cli("verify", copy.folder), run_cli("verify", copy.folder, "--quick")
    restored, back = copy.restore()
    if same:  # the kept bytes of both sources are equal
        assert (full.status, quick.status, restored.status) == (0, 0, 0)
        return
    assert full.status == 4
    if which != "manifest":  # with a foreign manifest everything else is foreign
        assert str(copy.folder / name) in full.stderr
    assert restored.status == 4
    assert not back.exists()
    if which != "ple":  # its header says nothing of the values
        assert quick.status == 4, quick


def test_two_experts_files_of_one_bundle_swapped(copy: Made) -> None:
    one, two = (copy.folder / row.name for row in copy.manifest.experts)
    assert one.stat().st_size == two.stat().st_size
    one.rename(one.with_suffix(".x"))
    two.rename(one)
    one.with_suffix(".x").rename(two)
    for outcome in (run_cli("verify", copy.folder), run_cli("verify", copy.folder, "--quick"), copy.restore()[0]):
        assert outcome.status == 4
        assert str(one) in outcome.stderr


def test_two_blobs_swapped(copy: Made) -> None:
    """The right bytes in the wrong places."""
    layer = copy.manifest.layers[0]
    path = copy.folder / copy.manifest.experts[layer.shard].name
    data = bytearray(path.read_bytes())
    a, b, size = layer.offset_bytes, layer.offset_bytes + layer.stride_bytes, layer.stride_bytes
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
    path.write_bytes(data)
    full, (restored, back) = run_cli("verify", copy.folder, "--json"), copy.restore()
    problems = json.loads(full.stdout)["problems"]
    assert full.status == restored.status == 4
    assert [re.search(r"expert \d part \w+", p)[0] for p in problems] == [  # type: ignore[index]
        f"expert {e} part {r}" for e in (0, 1) for r in ("gate", "up", "down")
    ]
    assert not back.exists()


def test_many_problems_are_counted_and_not_all_listed(tmp_path: Path) -> None:
    source = synth.Gguf(synth.moe_entries(experts=80), synth.moe_tensors(experts=80)).write(tmp_path / "m.gguf")
    assert run_cli(source).status == 0
    path = tmp_path / "m.bel" / "m-experts.bin"
    with path.open("r+b") as file:
        file.seek(PAGE)
        file.write(b"\xff" * (path.stat().st_size - PAGE))
    problems = json.loads(run_cli("verify", tmp_path / "m.bel", "--json").stdout)["problems"]
    assert len(problems) == 201
    assert re.fullmatch(r"and \d+ more", problems[-1])


# Hostile manifests: edited, with a right digest


Edit = Callable[[dict[str, Any]], Any]


def rewrite(bundle: Path, edit: Edit) -> None:
    """Edit a manifest as an attacker would: whatever its digest covers is digested again."""
    path = bundle / "manifest.json"
    body = json.loads(path.read_bytes())
    edit(body)
    body["digest"] = "0" * 64
    text = json.dumps(body)
    digest = bytes_digest(text.encode())
    path.write_text(text.replace(f'"digest": "{"0" * 64}"', f'"digest": "{digest}"', 1))


def test_the_helper_makes_manifests_that_are_read(copy: Made) -> None:
    rewrite(copy.folder, lambda _body: None)
    assert run_cli("verify", copy.folder).status == 0
    assert copy.restore()[0].status == 0


def put(*keys: str | int, value: object) -> Edit:
    """Set the value at a path of keys."""

    def edit(body: dict[str, Any]) -> None:
        at: Any = body
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = value

    return edit


def drop(*keys: str | int) -> Edit:
    """Remove the value at a path of keys."""

    def edit(body: dict[str, Any]) -> None:
        at: Any = body
        for key in keys[:-1]:
            at = at[key]
        del at[keys[-1]]

    return edit


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


def limited(mib: int) -> Callable[[], None]:
    """A limit on the address space of a child: a huge allocation fails at once instead of costing the machine."""
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (mib * 2**20, mib * 2**20))


@pytest.mark.parametrize("command", ["verify", "restore"])
def test_a_digest_table_that_claims_gigabytes_is_refused_before_it_is_read(copy: Made, command: str) -> None:
    """2^27 experts of one byte, in sparse files of the sizes that the manifest gives."""
    n, stacks = 2**27, [i for i, t in enumerate(copy.manifest.tensors) if t.dest == "experts"]

    def edit(body: dict[str, Any]) -> None:
        body["layers"] = {"0": body["layers"]["0"]}
        layer = body["layers"]["0"]
        layer.update(n_expert=n, n_used=None, parts=[{**p, "bytes": 1} for p in layer["parts"]])
        keep = [p["tensor"] for p in layer["parts"]]
        for i in stacks:
            body["tensors"][i].update(bytes=n if i in keep else 1, ne=[1, 1, n])
            if i not in keep:
                body["tensors"][i].update(dest="dense", dest_offset=body["files"]["dense"]["digest_bytes"])
        for row in body["sources"]:
            row.update(bytes=2**33, hole_bytes=2**33, sha256=None)
        for number, tensor in enumerate(body["tensors"]):
            tensor["source_offset"] = 2**20 + number * 2**28
        body["files"]["experts"] = [{**body["files"]["experts"][0], "bytes": PAGE + n * layer["stride"]}]
        body["files"]["index"].update(bytes=24 + n * 3 * 32, digest_bytes=24 + n * 3 * 32)

    rewrite(copy.folder, edit)
    body = json.loads((copy.folder / "manifest.json").read_bytes())
    for row in (body["files"]["index"], body["files"]["experts"][0]):
        os.truncate(copy.folder / row["name"], row["bytes"])
    args = ("restore", copy.folder, "-o", copy.folder.parent / "back") if command == "restore" else ("verify", copy.folder)
    outcome = real(*args, preexec_fn=limited(1500))
    assert outcome.status == 4, outcome


def test_a_source_that_claims_terabytes_of_nothing(copy: Made) -> None:
    def edit(body: dict[str, Any]) -> None:
        body["sources"][1].update(bytes=2**40, hole_bytes=2**40, sha256=None)

    rewrite(copy.folder, edit)
    outcome = real("restore", copy.folder, "-o", copy.folder.parent / "back", preexec_fn=limited(350))
    assert outcome.status in (0, 4), outcome


@pytest.mark.parametrize("where", ["a manifest", "a GGUF"])
def test_a_tensor_of_no_bytes_and_countless_slices(copy: Made, where: str) -> None:
    if where == "a manifest":
        rewrite(copy.folder, lambda b: b["tensors"][1].update(bytes=0, ne=[0, 1, 2**40], type=0))
        args: tuple[str | Path, ...] = ("restore", copy.folder, "-o", copy.folder.parent / "back")
    else:
        nothing = synth.Tensor("nothing.weight", (0, 1, 2**40), synth.F32)
        args = ("inspect", "--digest", synth.moe(tensors=[nothing, *synth.moe_tensors()]).write(copy.folder.parent / "m.gguf"))

    def limit() -> None:
        limited(700)()
        resource.setrlimit(resource.RLIMIT_CPU, (2, 2))

    outcome = real(*args, preexec_fn=limit)
    assert outcome.status in (0, 3, 4), outcome


def seconds_to_decode(body: dict[str, Any]) -> float:
    body["digest"] = "0" * 64
    text = json.dumps(body)
    data = text.replace(f'"digest": "{"0" * 64}"', f'"digest": "{bytes_digest(text.encode())}"', 1).encode()
    best = 1e9
    for _ in range(2):
        began = time.process_time()
        with contextlib.suppress(DamagedBundleError):
            decode(data, "manifest.json")
        best = min(best, time.process_time() - began)
    return best


def many_dimensions(body: dict[str, Any], n: int) -> None:
    body["tensors"][0]["ne"] = [1] * n


def many_layers(body: dict[str, Any], n: int) -> None:
    body["tensors"] = body["tensors"] + [body["tensors"][0]] * n
    body["layers"] = {str(i): body["layers"]["0"] for i in range(n)}


def many_sources(body: dict[str, Any], n: int) -> None:
    first = body["sources"][0]
    body["sources"] = [{**first, "name": f"{i}.gguf", "header_file": f"source/{i}", "kept": []} for i in range(n)]
    table = {**body["tensors"][1], "source": 0, "bytes": 0, "source_offset": 0, "dest": "dense"}
    stacks = [{**t, "source": n - 1} for t in body["tensors"] if t["dest"] == "experts"]
    body["tensors"] = stacks + [table] * n
    at = 0
    for layer in body["layers"].values():
        for part in layer["parts"]:
            part["tensor"], at = at, at + 1


@pytest.mark.parametrize("grow", [many_dimensions, many_layers, many_sources])
def test_decoding_takes_time_in_proportion_to_the_manifest(made: Made, grow: Callable[[dict[str, Any], int], None]) -> None:
    """A manifest may have 64 MiB: what is quadratic in it takes hours to be refused."""
    seconds = []
    for n in (100, 3200):
        body = json.loads((made.folder / "manifest.json").read_bytes())
        grow(body, n)
        seconds.append(seconds_to_decode(body))
    assert seconds[1] < 3 * 32 * seconds[0], seconds


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
