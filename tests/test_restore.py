"""`bel-repack restore`: every form of source comes back byte for byte, all files or none, and nothing else is touched."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import synth
from faults import Outcome, run_cli, tree
from synth import F32, Gguf, Tensor

MXFP4, UNKNOWN = 39, 153


def fused(seed: int = 0) -> Gguf:
    """gate_up in one stack, biases and scales beside it."""
    tensors = [
        Tensor("blk.0.ffn_gate_up_exps.weight", (32, 128, 4)),
        Tensor("blk.0.ffn_gate_up_exps.bias", (128, 4), F32),
        Tensor("blk.0.ffn_down_exps.weight", (64, 32, 4), MXFP4),
        Tensor("blk.0.ffn_down_exps.scale", (4,), F32),
        Tensor("blk.0.ffn_norm_exps.weight", (32,), F32),
        Tensor("blk.0.ffn_gate_shexp.weight", (32, 32)),
        Tensor("blk.0.ffn_gate_chexps.weight", (32, 32, 2)),
    ]
    return synth.moe(tensors=tensors, seed=seed)


def unknown_types() -> Gguf:
    """Types that no table knows, in a stack and in last place."""
    tensors = [
        Tensor("blk.0.ffn_up_exps.weight", (32, 64, 4), UNKNOWN, data=bytes(range(64)) * 16),
        Tensor("blk.0.ffn_down_exps.weight", (64, 32, 4)),
        Tensor("blk.0.attn_q.weight", (32, 3), UNKNOWN, data=b"x" * 96),
    ]
    return synth.moe(tensors=tensors)


def one_expert() -> Gguf:
    """Stacks whose last dimension of 1 was dropped by the writer."""
    tensors = [Tensor("blk.0.ffn_up_exps.weight", (32, 64)), Tensor("blk.0.ffn_down_exps.weight", (64, 32))]
    return synth.moe(entries=synth.moe_entries(used=1), tensors=tensors)


FORMS: dict[str, Callable[[], Gguf]] = {
    "plain": synth.moe,
    "version 2": lambda: synth.moe(version=2),
    **{f"alignment {a}": functools.partial(synth.moe, alignment=a) for a in (8, 16, 64, 4096, 65536)},
    "dirty padding": lambda: synth.moe(pad_byte=0xA5),
    "no padding at the end": lambda: synth.moe(pad_last=False),
    "trailing bytes": lambda: synth.moe(tail=b"signature"),
    "a long dirty tail": lambda: synth.moe(tail=bytes(range(1, 255)) * 9000),
    "a long clean tail": lambda: synth.moe(tail=bytes(3 * 2**20 + 1)),
    "data in another order": lambda: synth.moe(order=list(range(11, -1, -1))),
    "gaps": lambda: synth.moe(tensors=[Tensor(t.name, t.ne, t.type_id, gap_bytes=96) for t in synth.moe_tensors()]),
    "dirty gaps": lambda: synth.moe(
        tensors=[Tensor(t.name, t.ne, t.type_id, gap_bytes=96) for t in synth.moe_tensors()], pad_byte=1
    ),
    "an empty tensor": lambda: synth.moe(tensors=[*synth.moe_tensors(), Tensor("empty.weight", (0,), F32)]),
    "an empty tensor first": lambda: synth.moe(tensors=[Tensor("empty.weight", (32, 0), F32), *synth.moe_tensors()]),
    "a scalar": lambda: synth.moe(tensors=[Tensor("scalar", (), F32), *synth.moe_tensors()]),
    "fused gate and up": fused,
    "unknown types": unknown_types,
    "one expert": one_expert,
    "PLE": lambda: synth.moe(tensors=[Tensor("per_layer_token_embd.weight", (256, 8)), *synth.moe_tensors()]),
    "experts only": lambda: synth.moe(tensors=synth.expert_stacks(0, 4)),
    "layers unlike": lambda: synth.moe(
        tensors=[
            *synth.expert_stacks(1, 3, width=64),
            *synth.expert_stacks(40, 5, ff=96),
            *synth.expert_stacks(7, 2, type_id=F32),
        ]
    ),
    "names that are no text": lambda: synth.moe(tensors=[Tensor(os.fsdecode(b"\xff\x00\n"), (8,), F32), *synth.moe_tensors()]),
    "keys of bel": lambda: synth.moe(entries=[*synth.moe_entries(), synth.key("bel.content_digest", synth.STRING, "stale")]),
    "no metadata": lambda: Gguf([], synth.moe_tensors()),
}


def round_trip(folder: Path, first: Path, *options: str) -> None:
    """Convert the model in `folder`/in, restore it, and compare; verify against the source on the way."""
    bundle = folder / "m.bel"
    done = run_cli(first, "-o", bundle, *options)
    assert done.status == 0, done
    checked = run_cli("verify", bundle, "--source", first)
    assert checked.status == 0, checked
    restored = run_cli("restore", bundle, "-o", folder / "back")
    assert restored.status == 0, restored
    assert tree(folder / "back") == tree(folder / "in")


@pytest.mark.parametrize("form", FORMS)
def test_single_files(tmp_path: Path, form: str) -> None:
    (tmp_path / "in").mkdir()
    round_trip(tmp_path, FORMS[form]().write(tmp_path / "in" / "m.gguf"))


SETS: dict[str, tuple[Callable[[], Gguf], list[int], int]] = {
    "two files": (synth.moe, [6, 6], 32),
    "metadata alone in the first": (synth.moe, [0, 6, 6], 32),
    "an empty one in the middle and at the end": (synth.moe, [6, 0, 6, 0], 32),
    "a tensor a file": (synth.moe, [1] * 12, 32),
    "the first alone aligned": (lambda: synth.moe(alignment=4096), [2, 5, 5], 32),
    "a layer cut": (synth.moe, [4, 8], 32),
    "dirty padding": (lambda: synth.moe(pad_byte=9), [4, 8], 32),
}


@pytest.mark.parametrize("form", SETS)
@pytest.mark.parametrize("named", [0, -1])
def test_split_sets(tmp_path: Path, form: str, named: int) -> None:
    (tmp_path / "in").mkdir()
    make, counts, later = SETS[form]
    paths = [shard.write(tmp_path / "in" / name) for name, shard in synth.split(make(), counts, later_alignment=later).items()]
    round_trip(tmp_path, paths[named], "--shard-size", "40000")


def test_the_trained_example(tmp_path: Path, example: Path) -> None:
    (tmp_path / "in").mkdir()
    shutil.copyfile(example, tmp_path / "in" / example.name)
    round_trip(tmp_path, tmp_path / "in" / example.name)


def test_a_dense_file_does_not_need_to_be_restored_from_alone(tmp_path: Path) -> None:
    """The bundle may move and be renamed: nothing in it says where it was."""
    path = synth.moe().write(tmp_path / "m.gguf")
    assert run_cli(path).status == 0
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "m.bel").rename(tmp_path / "elsewhere" / "other-name")
    assert run_cli("restore", tmp_path / "elsewhere" / "other-name", "-o", tmp_path / "back").status == 0
    assert (tmp_path / "back" / "m.gguf").read_bytes() == path.read_bytes()


# Where to


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """The bundle of a split set of two."""
    (tmp_path / "in").mkdir()
    first, *_ = [shard.write(tmp_path / "in" / name) for name, shard in synth.split(synth.moe(), [6, 6]).items()]
    assert run_cli(first, "-o", tmp_path / "m.bel").status == 0
    return tmp_path / "m.bel"


def assert_refused(outcome: Outcome, status: int, *words: object) -> None:
    assert outcome.status == status, outcome
    assert outcome.stdout == ""
    assert all(str(w) in outcome.stderr for w in words), outcome.stderr


def test_the_current_folder_is_the_default(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run_cli("restore", f"../{bundle.name}").status == 0
    assert tree(tmp_path / "here") == tree(tmp_path / "in")


def test_other_files_of_the_folder_are_left_alone(bundle: Path, tmp_path: Path) -> None:
    back = tmp_path / "back"
    (back / "folder").mkdir(parents=True)
    (back / "notes.txt").write_text("mine")
    (back / "folder" / "model-00001-of-00002.gguf").write_text("mine too")
    before = tree(back, times=True)
    assert run_cli("restore", bundle, "-o", back).status == 0
    after = tree(back, times=True)
    assert {k: v for k, v in after.items() if k in before} == before
    assert set(after) - set(before) == set(tree(tmp_path / "in"))


@pytest.mark.parametrize("taken", ["model-00001-of-00002.gguf", "model-00002-of-00002.gguf"])
@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_an_existing_file_is_refused_without_force(bundle: Path, tmp_path: Path, taken: str, kind: str) -> None:
    back = tmp_path / "back"
    back.mkdir()
    if kind == "file":
        (back / taken).write_text("mine")
    else:
        (back / taken).symlink_to(tmp_path / "gone")
    before = tree(back, times=True)
    assert_refused(run_cli("restore", bundle, "-o", back), 2, back / taken, "--force")
    assert tree(back, times=True) == before
    assert run_cli("restore", bundle, "-o", back, "--force").status == 0
    assert tree(back) == tree(tmp_path / "in")
    assert not (tmp_path / "gone").exists(), "a link is replaced, not followed"


def test_force_on_the_original_itself_is_safe(bundle: Path, tmp_path: Path) -> None:
    before = tree(tmp_path / "in")
    assert_refused(run_cli("restore", bundle, "-o", tmp_path / "in"), 2, tmp_path / "in")
    assert run_cli("restore", bundle, "-o", tmp_path / "in", "--force").status == 0
    assert tree(tmp_path / "in") == before


def test_a_folder_with_the_name_of_a_file_is_never_replaced(bundle: Path, tmp_path: Path) -> None:
    taken = tmp_path / "back" / "model-00002-of-00002.gguf"
    taken.mkdir(parents=True)
    (taken / "thesis.txt").write_text("mine")
    for flags in ([], ["--force"]):
        assert_refused(run_cli("restore", bundle, "-o", tmp_path / "back", *flags), 2, taken)
        assert set(tree(tmp_path / "back")) == {taken.name, f"{taken.name}/thesis.txt"}


def test_not_into_the_bundle(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tree(bundle)
    (tmp_path / "link").symlink_to(bundle, target_is_directory=True)
    for folder in (bundle, tmp_path / "link", bundle / "source" / ".."):
        assert_refused(run_cli("restore", bundle, "-o", folder, "--force"), 2, "bundle")
    monkeypatch.chdir(bundle)
    assert_refused(run_cli("restore", "."), 2, "bundle")
    assert tree(bundle) == before


@pytest.mark.parametrize("inside", ["source", "restored"])
def test_not_into_a_folder_of_the_bundle(bundle: Path, inside: str) -> None:
    before = tree(bundle)
    assert_refused(run_cli("restore", bundle, "-o", bundle / inside), 2, "bundle")
    assert tree(bundle) == before


def test_an_output_that_cannot_be_a_folder(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    for output in (tmp_path / "file", tmp_path / "dangling"):
        assert_refused(run_cli("restore", bundle, "-o", output), 2, output, "not a folder")
    assert_refused(run_cli("restore", bundle, "-o", tmp_path / "file" / "back"), 2, tmp_path / "file")
    assert_refused(run_cli("restore", bundle, "-o", tmp_path / "no" / "such"), 2, tmp_path / "no", "does not exist")
    assert not (tmp_path / "gone").exists()
    assert not (tmp_path / "no").exists()


def test_damage_in_the_last_file_keeps_the_first_from_its_name(bundle: Path, tmp_path: Path) -> None:
    path = bundle / "model-experts.bin"
    data = bytearray(path.read_bytes())
    data[-8192] ^= 1  # the last blob, which belongs to the second file
    path.write_bytes(data)
    assert_refused(run_cli("restore", bundle, "-o", tmp_path / "back"), 4, "layer 1 expert 3 part gate", path)
    assert not (tmp_path / "back").exists()
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "notes.txt").write_text("mine")
    assert_refused(run_cli("restore", bundle, "-o", tmp_path / "back"), 4)
    assert set(tree(tmp_path / "back")) == {"notes.txt"}


def test_a_missing_file_of_the_bundle_is_found_before_anything_is_written(bundle: Path, tmp_path: Path) -> None:
    (bundle / "model-dense.gguf").unlink()
    assert_refused(run_cli("restore", bundle, "-o", tmp_path / "back"), 4, bundle / "model-dense.gguf", "missing")
    assert not (tmp_path / "back").exists()


def test_a_file_that_appears_meanwhile_is_not_replaced(bundle: Path, tmp_path: Path) -> None:
    from bel.formats.bundle import open_bundle
    from bel.formats.errors import UsageError
    from bel.repack.restore import restore

    taken = tmp_path / "back" / "model-00002-of-00002.gguf"

    def someone_else(_phase: str, _done: int, _total: int) -> None:
        taken.write_text("mine")

    with pytest.raises(UsageError, match="exists already"):
        restore(open_bundle(bundle), tmp_path / "back", force=False, progress=someone_else)
    assert {p.name for p in (tmp_path / "back").iterdir()} == {taken.name}
    assert taken.read_text() == "mine"


def test_restored_files_can_be_converted_again_to_the_same_bundle(bundle: Path, tmp_path: Path) -> None:
    assert run_cli("restore", bundle, "-o", tmp_path / "back").status == 0
    assert run_cli(tmp_path / "back" / "model-00001-of-00002.gguf").status == 0
    assert tree(tmp_path / "back" / "model.bel") == tree(bundle)
