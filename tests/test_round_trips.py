"""Any valid model comes back byte for byte: random ones, of whose bundles a plain reader reads every byte, and odd finds."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, event, given, settings

import synth
from bel.formats.bundle import Bundle
from bel.formats.ggml_types import tensor_bytes
from bel.formats.gguf_model import open_model
from bel.formats.shards import model_base_name
from bel.repack.layout import plan_layout
from drawn_models import Drawn, models, written
from plain_reader import Reader, raw_name
from round_trips import NO_LIMIT, round_trip
from synth import ARRAY, F32, Tensor, gguf_string, key


def check_dense(path: Path, first: Path, drawn: Drawn, names: list[str]) -> None:
    """`path` holds the tensors `names`, each with its bytes at the place that llama.cpp demands, and the keys of `first`."""
    dense, source = Reader(path), Reader(first)
    assert list(dense.tensors) == [raw_name(n) for n in names]
    assert (dense.version, dense.alignment) == (source.version, source.alignment)
    by_name, at = {t.name: t for t in drawn.tensors}, 0
    for name in names:
        data = drawn.data[name]
        assert dense.tensors[raw_name(name)] == (by_name[name].ne, by_name[name].type_id)
        assert dense.offsets[raw_name(name)] == at
        assert dense.data[dense.start + at : dense.start + at + len(data)] == data
        at += -(-len(data) // dense.alignment) * dense.alignment
    assert dense.start + at == len(dense.data)
    kept = {k: v for k, v in source.keys.items() if not k.startswith((b"split.", b"bel."))}
    assert {k: v for k, v in dense.keys.items() if not k.startswith(b"bel.")} == kept
    assert list(kept) == [k for k in dense.keys if k in kept]


def check_blobs(bundle: Bundle, drawn: Drawn) -> None:
    """Every slice of every stack stands where the manifest says."""
    for layer in bundle.manifest.layers:
        data = bundle.path(bundle.manifest.experts[layer.shard].name).read_bytes()
        assert layer.offset_bytes % 4096 == layer.stride_bytes % 4096 == 0
        for expert in range(layer.n_expert):
            for part in layer.parts:
                start = layer.offset_bytes + expert * layer.stride_bytes + part.offset_bytes
                stack = drawn.data[bundle.manifest.tensors[part.tensor].name]
                size = len(stack) // layer.n_expert
                assert data[start : start + size] == stack[expert * size : (expert + 1) * size]


def is_routed(name: str) -> bool:
    return name.startswith("blk.") and name.endswith("_exps.weight") and "norm" not in name


def check_round_trip(drawn: Drawn) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = written(drawn, folder)
        model, name = open_model(path), model_base_name(path)
        layout = plan_layout(model, name, ple=drawn.ple, shard_bytes=NO_LIMIT)
        if drawn.shard_bytes_limit:
            limit = 4096 + max(layer.size_bytes for layer in layout.layers)
            layout = plan_layout(model, name, ple=drawn.ple, shard_bytes=limit)
            assert all(size <= limit for size in layout.experts_bytes)
        bundle = round_trip(path, model, layout, folder)
        rest = [t.name for t in drawn.tensors if not is_routed(t.name)]
        tables = [n for n in rest if n == "per_layer_token_embd.weight" and bundle.manifest.ple]
        first = folder / sorted(drawn.shards)[0]
        check_dense(bundle.path(bundle.manifest.dense.name), first, drawn, [n for n in rest if n not in tables])
        if bundle.manifest.ple:
            ple = Reader(bundle.path(bundle.manifest.ple.name))
            data = drawn.data[tables[0]]
            assert ple.data[ple.start : ple.start + len(data)] == data
        check_blobs(bundle, drawn)
        event(f"{len(drawn.shards)} files, {len(bundle.manifest.experts)} experts files, PLE {bundle.manifest.ple is not None}")


@settings(max_examples=50)
@given(models())
def test_any_model_comes_back_byte_for_byte(drawn: Drawn) -> None:
    check_round_trip(drawn)


@settings(max_examples=30, phases=[Phase.explicit, Phase.generate])
@given(models(empties=True))
def test_any_model_with_empty_tensors_comes_back(drawn: Drawn) -> None:
    check_round_trip(drawn)


def whole_trip(path: Path) -> Bundle:
    model = open_model(path)
    layout = plan_layout(model, model_base_name(path), ple="auto", shard_bytes=NO_LIMIT)
    return round_trip(path, model, layout, path.parent)


@pytest.mark.parametrize("kind", ["before a tail", "before a gap"])
def test_an_empty_tensor_between_bytes_that_are_kept(kind: str, tmp_path: Path) -> None:
    model = synth.moe(pad_byte=0xAA, pad_last=False, tail=b"tail" if kind == "before a tail" else b"")
    empty = Tensor("empty", (0,), F32, gap_bytes=32)
    model.tensors = [*model.tensors[:-1], Tensor("odd", (3,), F32), empty]
    if kind == "before a gap":
        model.tensors.append(Tensor("behind", (3,), F32))
    whole_trip(model.write(tmp_path / "m.gguf"))


def test_a_header_with_a_hole(tmp_path: Path) -> None:
    """Token scores are often all zero, and `cp --sparse=always` makes a hole of 600 KB of them."""
    model = synth.moe()
    model.entries.append(key("tokenizer.ggml.scores", ARRAY, (6, [0.0] * 20_000)))
    blob, path = model.blob(), tmp_path / "m.gguf"
    with path.open("wb") as file:
        for at in range(0, len(blob), 4096):
            if any(blob[at : at + 4096]):
                file.seek(at)
                file.write(blob[at : at + 4096])
        file.truncate(len(blob))
    assert path.read_bytes() == blob
    if path.stat().st_blocks * 512 >= len(blob):
        pytest.skip("this file system keeps no holes")
    whole_trip(path)


@pytest.mark.parametrize("name", ["..gguf", "...gguf"])
def test_a_file_name_of_dots(name: str, tmp_path: Path) -> None:
    whole_trip(synth.moe().write(tmp_path / name))


@pytest.mark.parametrize(
    "name", ["-o.gguf", "a b.gguf", "two\nlines.gguf", "\udcff.gguf", ".gguf", "no suffix", "\u202emodel.gguf"]
)
def test_odd_file_names(name: str, tmp_path: Path) -> None:
    whole_trip(synth.moe().write(tmp_path / name))


def test_names_of_any_bytes(tmp_path: Path) -> None:
    model = synth.moe()
    for name in ("", "a\0b", "line\nbreak", "\udcff\udcfe", "n" * 63, "\U0001f600\udc80"):
        model.tensors.append(Tensor(name, (3,), F32))
    bundle = whole_trip(model.write(tmp_path / "m.gguf"))
    dense = Reader(bundle.path(bundle.manifest.dense.name))
    assert list(dense.tensors)[-6:] == [raw_name(t.name) for t in model.tensors[-6:]]
    assert gguf_string("\udcff\udcfe")[8:] in dense.tensors


@pytest.mark.parametrize("ne", [(1, 1, 4096), (1, 1, 8, 512)])
def test_a_tensor_of_many_tiny_slices(ne: tuple[int, ...], tmp_path: Path) -> None:
    model = synth.moe()
    model.tensors.insert(3, Tensor("tiny", ne, F32))
    assert tensor_bytes(F32, ne) == 4 * 4096
    whole_trip(model.write(tmp_path / "m.gguf"))
