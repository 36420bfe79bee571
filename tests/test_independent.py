"""A bundle as readers see it that share no code with this project: the gguf package and llama.cpp itself."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import llama_reader
from bel.formats.bundle import open_bundle
from bel.formats.gguf_header import scan_header
from bel.formats.gguf_model import open_model
from bel.formats.gguf_regions import tensor_regions
from bel.formats.shards import model_base_name
from bel.repack.convert import convert
from bel.repack.layout import plan_layout
from bel.repack.restore import restore

Q = gguf.GGMLQuantizationType
WIDTH, FF, VOCAB = 256, 512, 64
EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-moe-q8_0.gguf"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model for the gguf package to write: `types` are those of gate (or gate_up), up and down, layer by layer."""

    types: tuple[tuple[Q, Q, Q], ...]
    experts: tuple[int, ...] = (8, 8)
    alignment: int | None = None
    fused: bool = False
    ple: bool = False
    split_max_tensors: int = 0


def same(kind: Q) -> tuple[tuple[Q, Q, Q], ...]:
    return ((kind, kind, kind),) * 2


RECIPES = {
    "q8_0": Recipe(same(Q.Q8_0)),
    "q4_0": Recipe(same(Q.Q4_0)),
    "q4_k_m": Recipe(((Q.Q4_K, Q.Q4_K, Q.Q6_K), (Q.Q4_K, Q.Q4_K, Q.Q4_K))),
    "q3_k": Recipe(((Q.Q3_K, Q.Q3_K, Q.Q5_K), (Q.Q3_K, Q.Q3_K, Q.Q3_K)), experts=(8, 5)),
    "iq4_xs": Recipe(same(Q.IQ4_XS)),
    "iq2_xxs": Recipe(same(Q.IQ2_XXS)),
    "mxfp4": Recipe(same(Q.MXFP4)),
    "bf16": Recipe(same(Q.BF16)),
    "f16": Recipe(same(Q.F16), experts=(3, 3)),
    "fused": Recipe(((Q.Q4_K, Q.Q4_K, Q.Q5_0), (Q.Q4_K, Q.Q4_K, Q.Q8_0)), fused=True),
    "aligned": Recipe(same(Q.Q5_K), alignment=4096),
    "ple": Recipe(same(Q.Q4_K), alignment=64, ple=True),
    "split": Recipe(((Q.Q4_K, Q.Q4_K, Q.Q6_K), (Q.Q6_K, Q.Q4_K, Q.Q6_K)), split_max_tensors=4),
}


def random_tensor(rng: np.random.Generator, writer: gguf.GGUFWriter, name: str, kind: Q, *shape: int) -> None:
    """Add a tensor of random bytes; `shape` is in numpy order, its last dimension the row."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = (*shape[:-1], shape[-1] // block * block_bytes)
    data = rng.integers(0, 256, size=rows, dtype=np.uint8)
    if kind is Q.F32:
        writer.add_tensor(name, rng.standard_normal(shape, dtype=np.float32))
    else:
        writer.add_tensor(name, data, raw_dtype=kind)


def write_model(path: Path, recipe: Recipe) -> Path:
    """Write a model with the gguf package's writer; the path of its (first) file."""
    rng = np.random.default_rng(len(path.name) * 1000 + sum(recipe.experts))
    writer = gguf.GGUFWriter(path, "qwen3moe", split_max_tensors=recipe.split_max_tensors)
    if recipe.alignment:
        writer.add_custom_alignment(recipe.alignment)
    writer.add_name("independent")
    writer.add_block_count(len(recipe.types))
    writer.add_embedding_length(WIDTH)
    writer.add_expert_count(max(recipe.experts))
    writer.add_expert_used_count(2)
    writer.add_rope_freq_base(1e6)
    writer.add_bool("qwen3moe.flag", True)
    writer.add_token_list([f"token {i} \N{SNOWMAN}" for i in range(VOCAB)])
    writer.add_token_scores([i / 7 for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    random_tensor(rng, writer, "token_embd.weight", Q.F32, VOCAB, WIDTH)
    if recipe.ple:
        random_tensor(rng, writer, "per_layer_token_embd.weight", Q.Q8_0, VOCAB, WIDTH * 4)
    for layer, ((gate, up, down), experts) in enumerate(zip(recipe.types, recipe.experts, strict=True)):
        p = f"blk.{layer}."
        random_tensor(rng, writer, p + "attn_norm.weight", Q.F32, WIDTH)
        random_tensor(rng, writer, p + "attn_q.weight", Q.Q8_0, WIDTH, WIDTH)
        random_tensor(rng, writer, p + "ffn_gate_inp.weight", Q.F32, experts, WIDTH)
        if recipe.fused:
            random_tensor(rng, writer, p + "ffn_gate_up_exps.weight", gate, experts, 2 * FF, WIDTH)
        else:
            random_tensor(rng, writer, p + "ffn_gate_exps.weight", gate, experts, FF, WIDTH)
            random_tensor(rng, writer, p + "ffn_up_exps.weight", up, experts, FF, WIDTH)
        random_tensor(rng, writer, p + "ffn_down_exps.weight", down, experts, WIDTH, FF)
    random_tensor(rng, writer, "output_norm.weight", Q.F32, WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    written: list[Path] = writer.format_shard_names(path)
    return written[0]


def source_files(first: Path) -> list[Path]:
    """All files of the model."""
    if "-00001-of-" not in first.name:
        return [first]
    return sorted(first.parent.glob(first.name.replace("-00001-of-", "-*-of-")))


def nothing(_phase: str, _done: int, _total: int) -> None:
    """No progress."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A converted model.  `manifest` is plain JSON: what another program would read."""

    first: Path
    bundle: Path
    manifest: dict[str, Any]

    def file(self, kind: str) -> Path:
        return self.bundle / self.manifest["files"][kind]["name"]


def pack(first: Path, bundle: Path, shard_bytes: int = 2**40) -> Packed:
    model = open_model(first)
    layout = plan_layout(model, model_base_name(first), ple="auto", shard_bytes=shard_bytes)
    convert(model, layout, bundle, force=False, check=True, progress=nothing)
    return Packed(first, bundle, json.loads((bundle / "manifest.json").read_bytes()))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Packed]:
    """Converted models by name, each made once."""
    done: dict[str, Packed] = {}

    def get(name: str) -> Packed:
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            first = EXAMPLE if name == "example" else write_model(folder / f"{name}.gguf", RECIPES[name])
            done[name] = pack(first, folder / "out.bel")
        return done[name]

    return get


every_model = pytest.mark.parametrize("name", ["example", *RECIPES])


def gguf_keys(reader: gguf.GGUFReader) -> dict[str, tuple[Any, ...]]:
    """Type and content of every key, as the gguf package reads them; its own synthetic ones left out."""
    fields = {n: f for n, f in reader.fields.items() if not n.startswith("GGUF.")}
    return {n: (f.types, f.contents()) for n, f in fields.items()}


def gguf_tensors(paths: list[Path]) -> dict[str, tuple[int, list[int], bytes]]:
    """Type, dimensions and bytes of every tensor, as the gguf package reads them."""
    readers = [gguf.GGUFReader(p) for p in paths]
    tensors = [t for r in readers for t in r.tensors]
    return {t.name: (int(t.tensor_type), t.shape.tolist(), t.data.tobytes()) for t in tensors}


def added(keys: dict[str, Any]) -> set[str]:
    return {k for k in keys if k.startswith("bel.")}


def without_split(keys: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in keys.items() if not k.startswith("split.")}


@every_model
def test_the_gguf_package_reads_the_same_keys_and_tensors_from_the_dense_file(
    packed: Callable[[str], Packed], name: str
) -> None:
    it = packed(name)
    source, dense = gguf_keys(gguf.GGUFReader(it.first)), gguf_keys(gguf.GGUFReader(it.file("dense")))
    assert added(dense) == {"bel.bundle_version", "bel.content_digest"}
    assert dense["bel.content_digest"][1] == it.manifest["content_digest"]
    kept = {k: v for k, v in dense.items() if k not in added(dense)}
    assert list(kept.items()) == list(without_split(source).items()), "every key, in the source's order"
    everything = gguf_tensors(source_files(it.first))
    moved = {n: t for n, t in everything.items() if "_exps.weight" not in n and n != "per_layer_token_embd.weight"}
    found = gguf_tensors([it.file("dense")])
    assert found == moved
    assert list(found) == list(moved), "the source's order is kept"


@every_model
def test_llama_cpp_parses_the_dense_file_as_it_parses_the_source(packed: Callable[[str], Packed], name: str) -> None:
    it = packed(name)
    sources, dense = [llama_reader.parse(p) for p in source_files(it.first)], llama_reader.parse(it.file("dense"))
    assert (dense.version, dense.alignment) == (sources[0].version, sources[0].alignment)
    kept = {k: v for k, v in dense.keys.items() if k not in added(dense.keys)}
    assert list(kept.items()) == list(without_split(sources[0].keys).items())
    moved = {t.name: (t.type_id, t.ne, t.size_bytes) for s in sources for t in s.tensors if "_exps.weight" not in t.name}
    moved.pop("per_layer_token_embd.weight", None)
    assert {t.name: (t.type_id, t.ne, t.size_bytes) for t in dense.tensors} == moved
    places = {row["name"]: row["dest_offset"] for row in it.manifest["tensors"] if row["dest"] == "dense"}
    assert {t.name: t.offset_bytes for t in dense.tensors} == places
    data = it.file("dense").read_bytes()
    source_bytes = gguf_tensors(source_files(it.first))
    for t in dense.tensors:
        assert data[t.offset_bytes : t.offset_bytes + t.size_bytes] == source_bytes[t.name][2]


@every_model
def test_blobs_are_the_slices_that_the_gguf_package_reads(packed: Callable[[str], Packed], name: str) -> None:
    it = packed(name)
    everything = gguf_tensors(source_files(it.first))
    names = [row["name"] for row in it.manifest["tensors"]]
    assert sorted(names) == sorted(everything)
    data = (it.bundle / it.manifest["files"]["experts"][0]["name"]).read_bytes()
    seen = []
    for number, layer in it.manifest["layers"].items():
        assert layer["offset"] % 4096 == 0 and layer["stride"] % 4096 == 0
        for part in layer["parts"]:
            tensor = names[part["tensor"]]
            assert tensor == f"blk.{number}.ffn_{part['role']}_exps.weight"
            _, ne, stack = everything[tensor]
            assert layer["n_expert"] == ne[2] and part["bytes"] * ne[2] == len(stack)
            for expert in range(ne[2]):
                at = layer["offset"] + expert * layer["stride"] + part["offset"]
                assert data[at : at + part["bytes"]] == stack[expert * part["bytes"] : (expert + 1) * part["bytes"]]
            seen.append(tensor)
    assert sorted(seen) == sorted(n for n in everything if "_exps.weight" in n)
    assert sum(row["bytes"] for row in it.manifest["files"]["experts"]) % 4096 == 0


def test_blobs_of_several_experts_files_lie_where_the_manifest_says(tmp_path: Path) -> None:
    first = write_model(tmp_path / "m.gguf", RECIPES["q4_k_m"])
    layer_bytes = 8 * 3 * WIDTH * FF  # more than any layer of this model takes, and less than two
    it = pack(first, tmp_path / "out.bel", shard_bytes=layer_bytes)
    assert len(it.manifest["files"]["experts"]) == 2
    everything = gguf_tensors([first])
    for layer in it.manifest["layers"].values():
        data = (it.bundle / it.manifest["files"]["experts"][layer["shard"]]["name"]).read_bytes()
        for part in layer["parts"]:
            stack = everything[it.manifest["tensors"][part["tensor"]]["name"]][2]
            for expert in range(layer["n_expert"]):
                at = layer["offset"] + expert * layer["stride"] + part["offset"]
                assert data[at : at + part["bytes"]] == stack[expert * part["bytes"] : (expert + 1) * part["bytes"]]


def test_both_readers_open_the_ple_shard_as_a_second_split(packed: Callable[[str], Packed]) -> None:
    it = packed("ple")
    table = "per_layer_token_embd.weight"
    assert gguf_tensors([it.file("ple")]) == {table: gguf_tensors([it.first])[table]}
    parsed, dense = llama_reader.parse(it.file("ple")), llama_reader.parse(it.file("dense"))
    assert [t.name for t in parsed.tensors] == [table]
    number, count, tensors = (parsed.keys[f"split.{k}"] for k in ("no", "count", "tensors.count"))
    assert (number, count) == ((llama_reader.U16, None, b"\1\0"), (llama_reader.U16, None, b"\2\0"))
    total = len(dense.tensors) + 1
    assert tensors == (llama_reader.I32, None, total.to_bytes(4, "little"))
    assert parsed.keys["general.architecture"] == dense.keys["general.architecture"]
    assert parsed.alignment == dense.alignment == 64
    row = next(r for r in it.manifest["tensors"] if r["name"] == table)
    assert (row["dest"], row["dest_offset"]) == ("ple", parsed.tensors[0].offset_bytes)


@every_model
def test_restored_files_have_the_sources_sha256(packed: Callable[[str], Packed], name: str, tmp_path: Path) -> None:
    it = packed(name)
    done = restore(open_bundle(it.bundle), tmp_path / "back", force=False, progress=nothing)
    want = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in source_files(it.first)}
    assert {f.name: f.sha256 for f in done} == want
    assert {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (tmp_path / "back").iterdir()} == want
    assert {s["name"]: s["sha256"] for s in it.manifest["sources"]} == want


def test_llama_cpp_loads_a_restored_model(packed: Callable[[str], Packed], tmp_path: Path) -> None:
    restore(open_bundle(packed("example").bundle), tmp_path, force=False, progress=nothing)
    restored = tmp_path / EXAMPLE.name
    command = [sys.executable, llama_reader.__file__, "load", str(restored)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    elements = sum(int(t.n_elements) for t in gguf.GGUFReader(EXAMPLE).tensors)
    assert (answer["n_params"], answer["n_layer"]) == (elements, 6)


def test_llama_cpp_refuses_what_is_not_the_model(packed: Callable[[str], Packed]) -> None:
    """The loader above can fail: a dense file lacks the experts that its keys announce."""
    command = [sys.executable, llama_reader.__file__, "load", str(packed("example").file("dense"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "tensor 'blk.0.ffn_gate_exps.weight' not found" in done.stderr


@every_model
def test_our_scanner_agrees_with_both_readers(packed: Callable[[str], Packed], name: str) -> None:
    for path in source_files(packed(name).first):
        ours, theirs, package = scan_header(path), llama_reader.parse(path), gguf.GGUFReader(path)
        regions = tensor_regions(ours)
        assert (ours.version, ours.alignment, ours.data_start_bytes) == (
            theirs.version,
            theirs.alignment,
            theirs.data_start_bytes,
        )
        assert [(t.name, t.type_id) for t in ours.tensors] == [(t.name, t.type_id) for t in theirs.tensors]
        assert [t.ne + (1,) * (4 - len(t.ne)) for t in ours.tensors] == [t.ne for t in theirs.tensors]
        assert [(r.start_bytes, r.size_bytes) for r in regions] == [(t.offset_bytes, t.size_bytes) for t in theirs.tensors]
        assert [(t.name, t.type_id, list(t.ne)) for t in ours.tensors] == [
            (t.name, int(t.tensor_type), t.shape.tolist()) for t in package.tensors
        ]
        assert [(r.start_bytes, r.size_bytes) for r in regions] == [
            (int(t.data_offset), int(t.n_bytes)) for t in package.tensors
        ]
        assert list(ours.keys) == list(theirs.keys) == list(gguf_keys(package))
        assert {k: kv.type_id for k, kv in ours.keys.items()} == {k: v[0] for k, v in theirs.keys.items()}
        assert {k: ours.value(k) for k in ours.keys} == {k: v[1] for k, v in gguf_keys(package).items()}
