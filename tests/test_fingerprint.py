"""The fingerprint: the same for a model however its bytes are laid out, another for another model of equal shape."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

import archs
from bel.formats.bundle import open_bundle
from bel.formats.console import run_command
from bel.formats.errors import BadInputError
from bel.formats.fingerprint import HEAD_BYTES, fingerprint
from bel.formats.gguf_model import open_model
from bel.repack.cli import NAME, main_group
from synth import F32, STRING, U32, Gguf, Tensor, key, moe_entries

NAMES = ("token_embd.weight", "blk.0.ffn_gate_inp.weight", *(f"blk.0.ffn_{r}_exps.weight" for r in ("gate", "up", "down")))


def tensors(seed: int = 0, experts: int = 4) -> list[Tensor]:
    """A small dense tensor, a small router, and stacks whose slices are larger than a page."""
    shapes = [(32, 8), (32, experts), (64, 96, experts), (64, 96, experts), (96, 64, experts)]
    made = [Tensor(name, ne, 0 if len(ne) == 2 else 8) for name, ne in zip(NAMES, shapes, strict=True)]
    return [Tensor(t.name, t.ne, t.type_id, t.bytes_of(seed)) for t in made]


def of(gguf: Gguf, path: Path) -> str:
    return fingerprint(open_model(gguf.write(path)))


def test_its_encoding_is_the_documented_one(tmp_path: Path) -> None:
    """Computed by hand from the docstring: expert 0's first page for a stack, all of a small tensor."""
    model = tensors()
    leaves = []
    for t in model:
        name = t.name.encode()
        head = struct.pack("<Q", len(name)) + name + struct.pack(f"<II{len(t.ne)}Q", t.type_id, len(t.ne), *t.ne)
        assert t.data is not None
        leaves.append(blake3(head + t.data[: min(HEAD_BYTES, len(t.data) // (t.ne[2] if len(t.ne) > 2 else 1))]).digest())
    expected = blake3(b"bel-fingerprint-1\0" + struct.pack("<Q", len(leaves)) + b"".join(sorted(leaves))).hexdigest()
    assert of(Gguf(moe_entries(), model), tmp_path / "x.gguf") == expected


def test_layout_and_metadata_do_not_matter(tmp_path: Path) -> None:
    """Another order of infos and data, another alignment, slack, other keys."""
    base = of(Gguf(moe_entries(), tensors()), tmp_path / "a.gguf")
    others = [
        Gguf(moe_entries(), tensors()[::-1]),
        Gguf([*moe_entries(alignment=4096), key("general.author", STRING, "x")], tensors(), alignment=4096),
        Gguf(moe_entries(), tensors(), tail=b"behind"),
        Gguf(moe_entries(experts=4, used=3), tensors(), pad_byte=7),
    ]
    for number, gguf in enumerate(others):
        assert of(gguf, tmp_path / f"{number}.gguf") == base


@pytest.mark.parametrize(
    ("arch", "quant"), [("qwen3moe", "q8_0"), ("gemma4", "f32"), ("gpt-oss", "mxfp4"), ("deepseek4", "f32")]
)
def test_a_bundle_has_the_fingerprint_of_its_source(arch: str, quant: str, tmp_path: Path) -> None:
    """Merged stacks, biases, slices of two pages and of half a page: the experts are elsewhere and read the same."""
    source = archs.make_model(arch, tmp_path / "model.gguf", quant=quant)
    assert run_command(main_group, NAME, [str(source)]) == 0
    assert fingerprint(open_bundle(tmp_path / "model.bel")) == fingerprint(open_model(source))


def test_the_split_set_has_the_fingerprint_of_the_whole(tmp_path: Path) -> None:
    """Two shards, either of them named."""
    model = tensors()
    split = [key("split.count", 2, 2), key("split.tensors.count", 5, len(model))]
    for number, part in enumerate((model[:3], model[3:])):
        entries = [*(moe_entries() if number == 0 else []), key("split.no", 2, number), *split]
        Gguf(entries, part).write(tmp_path / f"m-{number + 1:05}-of-00002.gguf")
    whole = of(Gguf(moe_entries(), model), tmp_path / "whole.gguf")
    for number in (1, 2):
        assert fingerprint(open_model(tmp_path / f"m-{number:05}-of-00002.gguf")) == whole


@given(seed=st.integers(1, 2**32))
def test_other_weights_of_equal_shape_are_another_model(seed: int, tmp_path: Path) -> None:
    """The shapes, names and keys are the same."""
    assert of(Gguf(moe_entries(), tensors()), tmp_path / "a.gguf") != of(
        Gguf(moe_entries(), tensors(seed)), tmp_path / "b.gguf"
    )


@given(index=st.integers(0, len(NAMES) - 1), data=st.data())
def test_one_bit_in_any_first_page_is_another_model(index: int, data: st.DataObject, tmp_path: Path) -> None:
    """Of any tensor; and what lies behind the page is not looked at, as the docstring says."""
    model = tensors()
    old = model[index].data
    assert old is not None
    seen = min(HEAD_BYTES, len(old) // (4 if model[index].type_id == 8 else 1))
    bit = data.draw(st.integers(0, 8 * len(old) - 1))
    new = bytearray(old)
    new[bit // 8] ^= 1 << bit % 8
    changed = [*model]
    changed[index] = Tensor(model[index].name, model[index].ne, model[index].type_id, bytes(new))
    is_same = of(Gguf(moe_entries(), changed), tmp_path / "b.gguf") == of(Gguf(moe_entries(), model), tmp_path / "a.gguf")
    assert is_same == (bit // 8 >= seen)


def test_name_type_and_shape_count(tmp_path: Path) -> None:
    """The same bytes under another name, as another type, or in another shape."""
    base = [Tensor("a.weight", (32, 32), F32, bytes(4096))]
    others = [
        [Tensor("b.weight", (32, 32), F32, bytes(4096))],
        [Tensor("a.weight", (32, 32), 26, bytes(4096))],
        [Tensor("a.weight", (64, 16), F32, bytes(4096))],
        [*base, Tensor("b.weight", (1,), F32, bytes(4))],
    ]
    entries = [key("general.architecture", STRING, "x"), key("x.block_count", U32, 1)]
    prints = [of(Gguf(entries, model), tmp_path / f"{n}.gguf") for n, model in enumerate([base, *others])]
    assert len(set(prints)) == len(prints)


def test_a_file_that_shrank_is_named(tmp_path: Path) -> None:
    """The header was read, and then the data are gone."""
    path = Gguf(moe_entries(), tensors()).write(tmp_path / "x.gguf")
    model = open_model(path)
    with path.open("r+b") as file:
        file.truncate(model.tensors[-1].start_bytes + 10)
    with pytest.raises(BadInputError, match=r"x\.gguf: tensor blk\.0\.ffn_down_exps\.weight: truncated"):
        fingerprint(model)
