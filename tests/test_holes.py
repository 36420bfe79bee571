"""Sparse files: a hole stays a hole, costs no time and no space, and counts as zeros in every digest."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import faults
import synth
from bel.formats.ggml_types import tensor_bytes
from bel.formats.holes import extents, hole_bytes, settle
from faults import run_cli, tree

MIB = 2**20


@pytest.fixture(autouse=True)
def sparse_files(tmp_path: Path) -> None:
    """Every test here needs a file system that keeps holes and tells them."""
    path = tmp_path / "probe"
    with path.open("wb") as file:
        file.truncate(MIB)
    fd = os.open(path, os.O_RDONLY)
    holes = hole_bytes(fd, MIB)
    os.close(fd)
    path.unlink()
    if holes != MIB:
        pytest.skip("this file system does not report holes")


def on_disk(path: Path) -> int:
    """Bytes that a file, or all files of a folder, take on the disk."""
    return sum(p.stat().st_blocks * 512 for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file())


def sparse(path: Path, model: synth.Gguf, keep: Callable[[str], bool], size_bytes: int | None = None) -> Path:
    """Write a model; tensors for which `keep` is false are holes instead of data (they need no `data`, so may be huge)."""
    sizes = [tensor_bytes(t.type_id, t.ne) or 0 for t in model.tensors]
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(model.tensors), len(model.entries)) + b"".join(model.entries)
    at, offsets = 0, []
    for tensor, size in zip(model.tensors, sizes, strict=True):
        offsets.append(at)
        head += synth.gguf_string(tensor.name) + struct.pack("<I", len(tensor.ne))
        head += struct.pack(f"<{len(tensor.ne)}QIQ", *tensor.ne, tensor.type_id, at)
        at += -(-size // 32) * 32
    head += bytes(-len(head) % 32)
    with path.open("wb") as file:
        file.write(head)
        for tensor, offset in zip(model.tensors, offsets, strict=True):
            if keep(tensor.name):
                file.seek(len(head) + offset)
                file.write(tensor.bytes_of(model.seed))
        file.truncate(size_bytes if size_bytes is not None else len(head) + at)
    return path


def moe(width: int, ff: int, experts: int, layers: int = 2) -> synth.Gguf:
    """A model of any size; nothing of it is made until it is written."""
    tensors = [synth.Tensor("token_embd.weight", (width, 256), synth.Q8_0)]
    for layer in range(layers):
        tensors.append(synth.Tensor(f"blk.{layer}.ffn_gate_inp.weight", (32, experts), synth.F32))
        tensors += synth.expert_stacks(layer, experts, width=width, ff=ff)
    return synth.Gguf(synth.moe_entries(layers=layers, experts=experts), tensors)


def is_router(name: str) -> bool:
    return "gate_inp" in name


def full_copy(source: Path, target: Path) -> Path:
    """The same bytes, with real zeros in the place of holes."""
    target.write_bytes(source.read_bytes())
    os.sync()
    return target


def answer(*args: str | Path) -> dict[str, Any]:
    outcome = run_cli(*args, "--json")
    assert outcome.status == 0, outcome
    value: dict[str, Any] = json.loads(outcome.stdout)
    return value


def test_holes_are_kept_and_digests_are_those_of_zeros(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    model = moe(512, 512, 8)
    holed = sparse(tmp_path / "a" / "m.gguf", model, lambda n: is_router(n) or "up_exps" in n)
    full = full_copy(holed, tmp_path / "b" / "m.gguf")
    one, other = answer(holed), answer(full)
    assert one["content_digest"] == other["content_digest"]
    assert one["model"] == other["model"], "the sha256 too: these holes are small"
    assert one["bytes_read"] < other["bytes_read"] == full.stat().st_size
    bundles = tmp_path / "a" / "m.bel", tmp_path / "b" / "m.bel"
    for name in ("m-dense.gguf", "m-experts.bin", "m-experts.idx"):
        assert (bundles[0] / name).read_bytes() == (bundles[1] / name).read_bytes()
    data = sum(t.ne[0] // 32 * 34 * t.ne[1] * t.ne[2] for t in model.tensors if "up_exps" in t.name)
    assert on_disk(bundles[0]) < data + 40 * 4096 + 16 * 2 * 4096
    assert on_disk(bundles[1]) >= full.stat().st_size
    for bundle, source in zip(bundles, (full, holed), strict=True):
        assert run_cli("verify", bundle, "--source", source).status == 0, "either source fits either bundle"
        assert run_cli("restore", bundle, "-o", tmp_path / "back", "--force").status == 0
        assert (tmp_path / "back" / "m.gguf").read_bytes() == full.read_bytes()
    assert run_cli("restore", bundles[0], "-o", tmp_path / "back", "--force").status == 0
    assert on_disk(tmp_path / "back") < data + 40 * 4096


def test_holes_in_the_middle_of_slices(tmp_path: Path) -> None:
    """Holes that begin and end inside tensors, blobs and read buffers."""
    (tmp_path / "in").mkdir()
    path = sparse(tmp_path / "in" / "m.gguf", moe(512, 512, 24), lambda _: True)
    chance, size = random.Random(4), path.stat().st_size
    for _ in range(40):
        start = chance.randrange(size // 4096) * 4096
        subprocess.run(
            ["fallocate", "-p", "-o", str(start), "-l", str(chance.randrange(1, 200) * 4096), str(path)],
            check=True,
            capture_output=True,
        )
    assert on_disk(path) < size - 20 * 4096
    (tmp_path / "full").mkdir()
    full = full_copy(path, tmp_path / "full" / "m.gguf")
    if b"\0" * 4096 in path.read_bytes()[:4096]:
        pytest.fail("the header itself was punched; choose another seed")
    one, other = answer(path), answer(full)
    assert one["content_digest"] == other["content_digest"]
    assert one["model"] == other["model"]
    assert run_cli("restore", tmp_path / "in" / "m.bel", "-o", tmp_path / "back").status == 0
    assert (tmp_path / "back" / "m.gguf").read_bytes() == full.read_bytes()
    assert run_cli("verify", tmp_path / "in" / "m.bel", "--source", full).status == 0


def test_a_model_of_gigabytes_without_bytes(tmp_path: Path) -> None:
    """What tests of real shapes rest on: size costs nothing where nothing is written."""
    path = sparse(tmp_path / "m.gguf", moe(4096, 4096, 64), is_router)
    size = path.stat().st_size
    assert size > 6 * 2**30
    done = answer(path)
    assert done["experts_bytes"] > 6 * 2**30
    assert done["bytes_read"] < MIB
    assert on_disk(tmp_path) < 2 * MIB
    assert done["model"]["sources"][0]["sha256"] is None
    bundle = tmp_path / "m.bel"
    assert run_cli("verify", bundle, "--quick").status == 0
    assert run_cli("verify", bundle).status == 0
    restored = answer("restore", bundle, "-o", tmp_path / "back")
    assert restored["files"] == [{"name": "m.gguf", "bytes": size, "sha256": None}]
    assert on_disk(tmp_path) < 3 * MIB
    digest = answer("inspect", tmp_path / "back" / "m.gguf", "--digest")["content_digest"]
    assert digest == done["content_digest"]
    assert "not taken" in run_cli("restore", bundle, "-o", tmp_path / "back", "--force").stdout


def test_a_bit_in_a_hole_of_a_bundle_is_damage(tmp_path: Path) -> None:
    """With sha256 null the digests of the slices alone stand for the file; they cover holes too."""
    path = sparse(tmp_path / "m.gguf", moe(4096, 4096, 64), is_router)
    assert run_cli(path, "--no-verify").status == 0
    experts = tmp_path / "m.bel" / "m-experts.bin"
    with experts.open("r+b") as file:
        file.seek(2 * 2**30 + 12345)
        file.write(b"\1")
    checked = run_cli("verify", tmp_path / "m.bel")
    assert checked.status == 4
    assert "layer 0 expert" in checked.stderr
    restored = run_cli("restore", tmp_path / "m.bel", "-o", tmp_path / "back")
    assert restored.status == 4
    assert str(experts) in restored.stderr
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(("limit", "is_hashed"), [(0, False), (MIB, False), (2**31, True)])
def test_sha256_is_null_above_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, is_hashed: bool) -> None:
    path = sparse(tmp_path / "m.gguf", moe(512, 512, 8), is_router)
    for module in ("convert", "inspect"):
        monkeypatch.setattr(f"bel.repack.{module}.MAX_HASHED_HOLE_BYTES", limit)
    known = answer(path)["model"]["sources"][0]["sha256"]
    assert (known is not None) == is_hashed
    assert answer("inspect", path, "--digest")["model"]["sources"][0]["sha256"] == known
    assert run_cli("verify", tmp_path / "m.bel", "--source", path).status == 0
    assert answer("restore", tmp_path / "m.bel", "-o", tmp_path / "back")["files"][0]["sha256"] == known
    assert (tmp_path / "back" / "m.gguf").read_bytes() == path.read_bytes()


def test_without_sha256_a_changed_source_is_still_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sparse(tmp_path / "m.gguf", moe(512, 512, 8), is_router)
    monkeypatch.setattr("bel.repack.convert.MAX_HASHED_HOLE_BYTES", 0)
    assert run_cli(path).status == 0
    for at in (200, 2048, path.stat().st_size // 2, path.stat().st_size - 1):
        other = tmp_path / "other.gguf"
        shutil.copyfile(path, other)
        with other.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        outcome = run_cli("verify", tmp_path / "m.bel", "--source", other)
        assert outcome.status in (3, 4), at
        assert str(other) in outcome.stderr


def test_a_source_with_holes_is_warned_about(tmp_path: Path) -> None:
    """An unfinished download that was given its full size looks just like this."""
    path = sparse(tmp_path / "m.gguf", moe(512, 512, 8), is_router)
    outcome = run_cli(path)
    assert outcome.status == 0
    warnings = [line for line in outcome.stderr.splitlines() if "holes" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("bel-repack: warning: ")
    assert "MiB" in warnings[0]
    assert "download" in warnings[0]
    assert "holes" not in run_cli(full_copy(path, tmp_path / "full.gguf")).stderr


def test_split_sets_may_be_sparse_in_one_file_only(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "full").mkdir()
    paths = [s.write(tmp_path / "full" / n) for n, s in synth.split(moe(512, 512, 8), [5, 4]).items()]
    copies = [Path(shutil.copyfile(p, tmp_path / "in" / p.name)) for p in paths]
    size = copies[1].stat().st_size
    subprocess.run(["fallocate", "-p", "-o", "8192", "-l", str(size // 2), str(copies[1])], check=True, capture_output=True)
    assert run_cli(copies[0]).status == 0
    assert run_cli("restore", tmp_path / "in" / "model.bel", "-o", tmp_path / "back").status == 0
    assert tree(tmp_path / "back") == {p.name: tree(tmp_path / "in")[p.name] for p in copies}
    assert on_disk(tmp_path / "back" / copies[1].name) < size * 3 // 4


def test_a_hole_in_the_header(tmp_path: Path) -> None:
    """A vocabulary whose scores are all zero has pages of zeros; `cp --sparse=always` makes holes of them."""
    entries = [*synth.moe_entries(), synth.key("tokenizer.ggml.scores", synth.ARRAY, (6, [0.0] * 16384))]
    full = synth.moe(entries=entries).write(tmp_path / "full.gguf")
    path = tmp_path / "m.gguf"
    subprocess.run(["cp", "--sparse=always", full, path], check=True)
    assert on_disk(path) < on_disk(full)
    outcome = run_cli(path)
    assert outcome.status == 0, outcome
    assert run_cli("verify", tmp_path / "m.bel", "--source", path).status == 0
    assert run_cli("restore", tmp_path / "m.bel", "-o", tmp_path / "back").status == 0
    assert (tmp_path / "back" / "m.gguf").read_bytes() == full.read_bytes()


def test_a_hole_behind_the_last_tensor_comes_back(tmp_path: Path) -> None:
    path = sparse(tmp_path / "m.gguf", moe(512, 512, 8), lambda _: True, size_bytes=64 * MIB)
    done = answer(path)
    assert run_cli("verify", tmp_path / "m.bel", "--source", path).status == 0
    restored = answer("restore", tmp_path / "m.bel", "-o", tmp_path / "back")
    assert restored["files"][0]["sha256"] == done["model"]["sources"][0]["sha256"]
    assert (tmp_path / "back" / "m.gguf").read_bytes() == path.read_bytes()


def test_a_hole_behind_the_last_tensor_stays_a_hole(tmp_path: Path) -> None:
    path = sparse(tmp_path / "m.gguf", moe(512, 512, 8), lambda _: True, size_bytes=96 * MIB)
    assert run_cli(path).status == 0
    assert run_cli("restore", tmp_path / "m.bel", "-o", tmp_path / "back").status == 0
    assert on_disk(tmp_path / "back") < 32 * MIB


def test_a_hole_that_is_not_copied_is_not_counted_as_free_space(tmp_path: Path) -> None:
    path = sparse(tmp_path / "m.gguf", moe(512, 512, 8), lambda _: True, size_bytes=256 * MIB)
    with faults.mounted(tmp_path / "disk", "-o", "size=4m") as disk:
        outcome = run_cli(path, "-o", disk / "m.bel")
        assert outcome.status == 5
        assert "does not fit" in outcome.stderr, outcome.stderr


def test_a_sparse_model_needs_the_space_of_its_data_only(tmp_path: Path) -> None:
    path = sparse(tmp_path / "m.gguf", moe(2048, 2048, 32), is_router)
    assert path.stat().st_size > 800 * MIB
    with faults.mounted(tmp_path / "disk", "-o", "size=16m") as disk:
        outcome = run_cli(path, "-o", disk / "m.bel")
        assert outcome.status == 0, outcome
        assert run_cli("restore", disk / "m.bel", "-o", disk).status == 0
        shutil.rmtree(disk / "m.bel")


# The two functions below all of it


def test_extents_cover_a_file_once_in_order(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        for at in (3, 9, 10, 40):
            file.seek(at * 65536)
            file.write(b"x" * 65536)
        file.truncate(50 * 65536)
    fd = os.open(path, os.O_RDONLY)
    settle(fd)
    for start, end in (
        (0, 50 * 65536),
        (65536, 4 * 65536 + 7),
        (10 * 65536 + 1, 10 * 65536 + 2),
        (49 * 65536, 50 * 65536),
        (7, 7),
    ):
        found = list(extents(fd, start, end))
        assert [e.start_bytes for e in found] == [start, *(e.start_bytes + e.size_bytes for e in found)][: len(found)]
        assert sum(e.size_bytes for e in found) == end - start
        assert all(e.size_bytes > 0 for e in found)
        for extent in found:
            data = os.pread(fd, extent.size_bytes, extent.start_bytes)
            assert not (extent.is_hole and data.strip(b"\0"))
    assert hole_bytes(fd, 50 * 65536) == 46 * 65536
    os.close(fd)


def test_data_written_a_moment_ago_is_never_taken_for_a_hole(tmp_path: Path) -> None:
    """The converter reads what another process has just written, before it was flushed."""
    for number in range(5):
        path = sparse(tmp_path / f"{number}.gguf", moe(256, 256, 8), lambda n: "down" in n)
        model = path.read_bytes()
        assert run_cli(path).status == 0
        assert run_cli("restore", tmp_path / f"{number}.bel", "-o", tmp_path / "back").status == 0
        assert (tmp_path / "back" / path.name).read_bytes() == model
