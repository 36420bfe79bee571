"""Split sets: found from any shard, and every way in which one can be broken is named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import synth
from bel.formats.gguf_model import open_model
from bel.formats.shards import model_base_name
from refused import bad_model
from synth import F32, I32, STRING, U16, U32, Gguf, Tensor, key

COUNTS = [3, 5, 4]


def write(shards: dict[str, Gguf], folder: Path) -> list[Path]:
    return [shard.write(folder / name) for name, shard in shards.items()]


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """A set of three shards."""
    return write(synth.split(synth.moe(), COUNTS), tmp_path)


def keys(number: int, count: int, tensors: int | None = 12) -> list[bytes]:
    entries = [key("split.no", U16, number), key("split.count", U16, count)]
    return entries + ([] if tensors is None else [key("split.tensors.count", I32, tensors)])


@pytest.mark.parametrize("named", [0, 1, 2])
def test_any_shard_may_be_named(named: int, paths: list[Path]) -> None:
    model = open_model(paths[named])
    assert [f.path for f in model.files] == paths
    assert [t.name for t in model.tensors] == [t.name for t in synth.moe_tensors()]
    assert [t.source for t in model.tensors] == [0] * 3 + [1] * 5 + [2] * 4
    assert model.first.path == paths[0]


@pytest.mark.parametrize("named", [0, 1, 2])
def test_a_hugging_face_cache_of_links(named: int, paths: list[Path], tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "rev"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    links = []
    for number, path in enumerate(paths):
        path.rename(blobs / f"{number:064x}")
        links.append(snapshot / path.name)
        links[-1].symlink_to(f"../../blobs/{number:064x}")
    assert [f.path for f in open_model(links[named]).files] == links


@pytest.mark.parametrize("counts", [[0, 12], [0, 6, 6], [12, 0], [5, 0, 7]])
def test_a_shard_may_hold_metadata_only(counts: list[int], tmp_path: Path) -> None:
    for path in write(synth.split(synth.moe(), counts), tmp_path):
        model = open_model(path)
        assert [len(f.tensors) for f in model.files] == counts
        assert model.arch == "qwen3moe"


def test_later_shards_may_have_another_alignment(tmp_path: Path) -> None:
    first = synth.moe(alignment=4096)
    for later in (32, 64):
        paths = write(synth.split(first, COUNTS, later_alignment=later), tmp_path)
        assert [f.alignment for f in open_model(paths[1]).files] == [4096, later, later]


def test_split_keys_of_any_integer_type(tmp_path: Path) -> None:
    model = synth.moe()
    model.entries += [key("split.no", U32, 0), key("split.count", synth.U64, 1), key("split.tensors.count", U32, 12)]
    assert len(open_model(model.write(tmp_path / "whole-00001-of-00001.gguf")).files) == 1
    assert len(open_model(model.write(tmp_path / "whole.gguf")).files) == 1


@pytest.mark.parametrize("named", [0, 2])
def test_a_missing_shard_is_named(named: int, paths: list[Path]) -> None:
    paths[1].unlink()
    error = bad_model(paths[named])
    assert error.cause == ("the split set is incomplete: 1 of 3 shards missing beside it: model-00002-of-00003.gguf")


def test_many_missing_shards_are_counted(tmp_path: Path) -> None:
    path = Gguf(keys(4, 40), []).write(tmp_path / "m-00005-of-00040.gguf")
    error = bad_model(path)
    assert error.cause.startswith("the split set is incomplete: 39 of 40 shards missing beside it: m-00001-of-00040.gguf, ")
    assert error.cause.endswith("m-00009-of-00040.gguf and 31 more")


@pytest.mark.parametrize(("named", "culprit"), [(0, 1), (1, 1), (2, 2)])
def test_swapped_shards(named: int, culprit: int, paths: list[Path], tmp_path: Path) -> None:
    paths[1].rename(tmp_path / "aside")
    paths[2].rename(paths[1])
    (tmp_path / "aside").rename(paths[2])
    error = bad_model(paths[named], paths[culprit])
    assert error.cause == "the shard's split.no does not match its name: shards were swapped or renamed"
    assert error.found == f"split.no {3 - culprit}"
    assert error.expected == f"split.no {culprit} (it counts from 0)"


def test_a_shard_without_its_name(paths: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "part two.gguf"
    paths[1].rename(other)
    error = bad_model(other)
    assert error.cause == "the file is one shard of a split set but is not named like one, so the others cannot be found"
    assert error.found == "split.no 1, split.count 3"
    assert error.expected == "a name of the form NAME-00002-of-00003.gguf"
    assert error.hint == "Rename every shard of the set to its original name"


def test_the_name_declares_another_count(tmp_path: Path) -> None:
    error = bad_model(Gguf(keys(0, 3), []).write(tmp_path / "m-00001-of-00002.gguf"))
    assert error.cause == "the shard's name and its split.count disagree"
    assert (error.found, error.expected) == ("split.count 3", "split.count 2, going by the name")


def test_a_whole_file_named_like_a_shard(tmp_path: Path) -> None:
    error = bad_model(synth.moe().write(tmp_path / "m-00001-of-00002.gguf"))
    assert error.cause == "the file is named like shard 1 of 2 but its header has no split.count"
    assert error.hint == "Give it a name without -NNNNN-of-NNNNN if it is a whole model"


@pytest.mark.parametrize(("entries", "found"), [(keys(1, 4), "split.count 4"), ([], "no split.count")])
def test_a_foreign_sibling_by_its_count(entries: list[bytes], found: str, paths: list[Path]) -> None:
    Gguf(entries, []).write(paths[1])
    error = bad_model(paths[0], paths[1])
    assert error.cause == "the shard belongs to another split set"
    assert (error.found, error.expected) == (found, "split.count 3")


def test_a_foreign_sibling_by_its_tensors(paths: list[Path]) -> None:
    Gguf(keys(2, 3, 99), synth.moe_tensors()[8:]).write(paths[2])
    error = bad_model(paths[0], paths[2])
    assert error.cause == "split.tensors.count does not match the set: a shard is foreign or damaged"
    assert (error.found, error.expected) == ("12 tensors in the set's 3 files", "99")


def test_a_sibling_that_lacks_a_tensor(paths: list[Path]) -> None:
    Gguf(keys(2, 3), synth.moe_tensors()[9:]).write(paths[2])
    error = bad_model(paths[2], paths[0])
    assert (error.found, error.expected) == ("11 tensors in the set's 3 files", "12")


def test_one_tensor_in_two_shards(paths: list[Path]) -> None:
    tensors = [*synth.moe_tensors()[8:11], Tensor("token_embd.weight", (32, 8), F32)]
    Gguf(keys(2, 3), tensors).write(paths[2])
    error = bad_model(paths[1], paths[2])
    assert error.cause == "duplicate tensor name: it is in model-00001-of-00003.gguf already"
    assert error.tensor == "token_embd.weight"


def test_an_empty_shard(paths: list[Path]) -> None:
    paths[1].write_bytes(b"")
    assert bad_model(paths[0], paths[1]).cause == "the file is empty (0 bytes)"


def test_a_truncated_shard(paths: list[Path]) -> None:
    with paths[1].open("r+b") as file:
        file.truncate(paths[1].stat().st_size - 1)
    error = bad_model(paths[2], paths[1])
    assert error.cause == "the file is truncated: this tensor's data reach past the end of the file"
    assert error.tensor == synth.moe_tensors()[7].name


@pytest.mark.parametrize("named", [0, 1])
def test_a_dangling_link(named: int, paths: list[Path]) -> None:
    paths[1].unlink()
    paths[1].symlink_to("../../blobs/gone")
    error = bad_model(paths[named], paths[1])
    assert error.cause == "the file is a link to ../../blobs/gone, which does not exist"
    assert error.hint == "In a Hugging Face cache this is an unfinished or deleted download"


def test_a_link_to_itself(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.symlink_to(path.name)
    assert bad_model(path).cause == "the file is a link to m.gguf, which does not exist"


MAKERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda _: None, "no such file"),
    "folder": (os.mkdir, "this is a directory; name the .gguf file itself"),
    "fifo": (os.mkfifo, "this is not a regular file"),  # opening it would wait for a writer for ever
    "device": (lambda path: path.symlink_to("/dev/null"), "this is not a regular file"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_no_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    MAKERS[kind][0](path)
    assert bad_model(path).cause == MAKERS[kind][1]


@pytest.mark.parametrize("kind", ["folder", "fifo", "device"])
def test_a_sibling_that_is_no_file(kind: str, paths: list[Path]) -> None:
    paths[1].unlink()
    MAKERS[kind][0](paths[1])
    assert bad_model(paths[0], paths[1]).cause == MAKERS[kind][1]


def test_below_a_file_there_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"")
    assert bad_model(tmp_path / "m" / "model.gguf").cause == "no such file"


@pytest.mark.parametrize(("name", "number"), [("model-00004-of-00003.gguf", 3), ("model-00000-of-00003.gguf", -1)])
def test_a_number_outside_the_set(name: str, number: int, paths: list[Path]) -> None:
    """The file that was named must not be left aside without a word while its siblings are converted."""
    entries = [key("split.no", I32, number), key("split.count", U16, 3)]
    path = Gguf(entries, []).write(paths[0].with_name(name))
    assert "split.no" in bad_model(path).cause


@pytest.mark.parametrize(
    "name", ["m-\u0660\u0660\u0660\u0660\u0661-of-\u0660\u0660\u0660\u0660\u0662.gguf", "m-00001-of-00002.gguf\n"]
)
def test_names_that_only_resemble_a_shards(name: str, tmp_path: Path) -> None:
    assert len(open_model(synth.moe().write(tmp_path / name)).files) == 1


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("model.gguf", "model"),
        ("model-00002-of-00003.gguf", "model"),
        ("a-00001-of-00002-00001-of-00003.gguf", "a-00001-of-00002"),
        ("-00001-of-00002.gguf", "-00001-of-00002"),
        ("two\nlines-00001-of-00002.gguf", "two\nlines"),
        ("model.GGUF", "model.GGUF"),
        ("model.q4.gguf", "model.q4"),
        ("model-0001-of-0002.gguf", "model-0001-of-0002"),
        (".gguf", ".gguf"),
        ("model", "model"),
    ],
)
def test_base_names(name: str, base: str) -> None:
    assert model_base_name(Path("folder") / name) == base


def test_split_keys_of_the_wrong_type_are_none(tmp_path: Path) -> None:
    model = synth.moe()
    model.entries += [key("split.count", STRING, "3"), key("split.no", synth.BOOL, 1)]
    assert len(open_model(model.write(tmp_path / "m.gguf")).files) == 1
