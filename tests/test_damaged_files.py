"""Files of a bundle that are cut, missing, swapped or something else: found, named, and never restored from."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import synth
from damaged import PAGE, Made, copied, files_of, make
from faults import run_cli, tree


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("damage"))


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A bundle of the same shape: only the tensors' values differ."""
    return make(tmp_path_factory.mktemp("twin"), seed=1)


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Made:
    return copied(made, tmp_path / "m.bel")


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
