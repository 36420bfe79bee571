"""One wrong bit anywhere in a bundle: found, named, and never restored from."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.errors import DamagedBundleError
from bel.formats.manifest import DENSE, Manifest, decode
from damaged import PAGE, Made, copied, files_of, make
from faults import run_cli, tree


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("damage"))


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Made:
    return copied(made, tmp_path / "m.bel")


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
