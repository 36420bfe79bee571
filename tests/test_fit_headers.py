"""What `bel-profile fit` reads of a model: a header without data is enough, and as good as the whole file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import synth
from bel.formats.errors import BadInputError
from bel.formats.experts_file import blob_layout
from bel.formats.gguf_compose import compose
from bel.formats.gguf_header import scan_header
from bel.formats.gguf_model import open_model
from bel.formats.units import GIB, MIB
from bel.profiler.fit import Question, solve
from bel.profiler.footprint import read_footprint
from bel.repack.convert import convert
from bel.repack.layout import plan_layout
from fit_answers import fit_answer
from fit_models import MLA, QWEN3NEXT, Keys, arch_entries
from refused import refusal
from synth import ARRAY, F32, STRING, Gguf, Tensor, expert_stacks, key

SHAPES = json.loads((Path(__file__).parent / "data_fit" / "shapes.json").read_text(encoding="utf-8"))
TYPES = {"Q4_K": (12, 256, 144), "Q8_0": (8, 32, 34), "MXFP4": (39, 32, 17)}  # id, elements and bytes of a block (ggml.h)


def _shape_keys(shape: dict[str, Any]) -> Keys:
    """The metadata of a published model, as its architecture's converter writes them."""
    blocks = shape["n_layer"] + shape.get("n_nextn", 0)
    head = shape.get("head_dim", shape["n_embd"] // shape["n_head"] if isinstance(shape["n_head"], int) else 128)
    keys: Keys = {
        "block_count": blocks,
        "context_length": 131072,
        "embedding_length": shape["n_embd"],
        "feed_forward_length": shape.get("n_ff", shape["n_ff_exp"]),
        "expert_feed_forward_length": shape["n_ff_exp"],
        "expert_count": shape["n_expert"],
        "expert_used_count": shape["n_expert_used"],
        "attention.head_count": shape["n_head"] if isinstance(shape["n_head"], int) else [48, 64] * (blocks // 2),
        "attention.head_count_kv": shape.get("n_head_kv", 1),
        "attention.key_length": head,
        "attention.value_length": head,
    }
    if "n_nextn" in shape:
        keys["nextn_predict_layers"] = shape["n_nextn"]
    special: dict[str, Keys] = {
        "deepseek2": MLA,
        "qwen3next": QWEN3NEXT | {"block_count": blocks},
        "qwen35moe": QWEN3NEXT | {"block_count": blocks},
        "gpt-oss": {"attention.sliding_window": 128},
        "laguna": {"attention.sliding_window": 512},
        "gemma4": {"attention.sliding_window": 1024, "attention.sliding_window_pattern": [i % 6 != 5 for i in range(blocks)]},
        "lfm2moe": {"shortconv.l_cache": 3, "attention.head_count_kv": [8 if i % 4 == 2 else 0 for i in range(blocks)]},
    }
    return keys | special.get(shape["gguf_arch"], {})


def _slices(shape: dict[str, Any]) -> list[tuple[str, int]]:
    """Type and bytes of an expert's gate (or up) and of its down: Q4_K where whole blocks allow it."""
    found = []
    for role in (0, 1):
        kind = next(
            t for t in ("Q4_K", "MXFP4" if shape["gguf_arch"] == "gpt-oss" else "Q8_0") if shape["slice_bytes"][t][role]
        )
        found.append((kind, shape["slice_bytes"][kind][role]))
    return found


def _write_header(shape: dict[str, Any], path: Path, *, more: bytes = b"") -> Path:
    """The first bytes of the model's file: its header with a whole vocabulary, and `more`."""
    (in_type, in_bytes), (out_type, out_bytes) = _slices(shape)
    width, ff, n, blocks = shape["n_embd"], shape["n_ff_exp"], shape["n_expert"], shape["n_layer"] + shape.get("n_nextn", 0)
    tensors = [("token_embd.weight", (width, shape["vocab"]), 8, width // 32 * 34 * shape["vocab"])]
    for block in range(shape.get("n_dense_lead", 0), blocks):
        for role in ("gate", "up"):
            tensors.append((f"blk.{block}.ffn_{role}_exps.weight", (width, ff, n), TYPES[in_type][0], in_bytes * n))
        tensors.append((f"blk.{block}.ffn_down_exps.weight", (ff, width, n), TYPES[out_type][0], out_bytes * n))
    tensors.append(("output.weight", (width, shape["vocab"]), 8, width // 32 * 34 * shape["vocab"]))
    entries = arch_entries(shape["gguf_arch"], _shape_keys(shape))
    tokens = [f"token{i}" for i in range(shape["vocab"])]
    entries.append(key("tokenizer.ggml.tokens", ARRAY, (STRING, tokens)))
    path.write_bytes(compose(3, 32, entries, tensors).header() + more)
    return path


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape["name"])
def test_header_of_every_published_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: dict[str, Any]) -> None:
    path = _write_header(shape, tmp_path / "m.gguf")
    answer, _ = fit_answer(capsys, path, "--vram", "24G", "--ram", "64G")
    (_, in_bytes), (_, out_bytes) = _slices(shape)
    assert set(answer["expert_bytes"].values()) == {2 * in_bytes + out_bytes}
    assert set(answer["expert_stride_bytes"].values()) == {blob_layout([in_bytes, in_bytes, out_bytes])[1]}
    reached = range(shape.get("n_dense_lead", 0), shape["n_layer"])
    assert [int(layer) for layer in answer["slots_per_layer"]] == list(reached)
    assert len(reached) == shape["moe_layers"]
    assert answer["dense_bytes"] == 2 * (shape["n_embd"] // 32 * 34 * shape["vocab"])
    refusal(lambda: open_model(path))  # which every other command still does


def test_published_models_fit_as_worked_out_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen3-30B-A3B in 12 GiB: what is left after weights, cache, buffer, margin and a stage for the 128 experts of a layer, in
    slots of 2.53 MiB in 48 layers."""
    shape = next(s for s in SHAPES if s["name"] == "Qwen3-30B-A3B")
    answer, _ = fit_answer(capsys, _write_header(shape, tmp_path / "m.gguf"), "--vram", "12G", "--ram", "4G")
    dense, kv = 2048 // 32 * 34 * 151936, 8192 * 48 * 4 * 256 * 2  # the output's table: that of the input stays in RAM
    stride = 3 * 884736
    assert answer["stage_bytes"] == 128 * stride
    room = 12 * GIB - dense - kv - answer["compute_bytes"] - 512 * MIB - 128 * stride
    slots = room // (48 * stride)
    assert set(answer["slots_per_layer"].values()) == {slots}
    assert answer["slots_total"] == 48 * slots
    assert answer["resident_fraction"] == slots / 128
    rest = 48 * (128 - slots) * stride
    in_ram = 4 * GIB - GIB // 2 - dense
    assert in_ram < rest
    assert (answer["experts_in_ram_bytes"], answer["experts_on_disk_bytes"]) == (in_ram, rest - in_ram)


def test_a_fit_costs_little_more_than_the_scan_of_its_header(tmp_path: Path) -> None:
    path = _write_header(next(s for s in SHAPES if s["name"] == "Kimi-K2"), tmp_path / "m.gguf")

    def best(call: Callable[[], object]) -> float:
        took = []
        for _ in range(3):
            began = time.perf_counter()
            call()
            took.append(time.perf_counter() - began)
        return min(took)

    scan = best(lambda: scan_header(path))
    assert best(lambda: solve(read_footprint(path), Question(24 * GIB, 64 * GIB))) < 10 * scan


@given(cut=st.integers(0, 3000))
def test_a_file_cut_anywhere_behind_its_header(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    model = synth.moe()
    whole = model.blob()
    start = min(model.offsets.values())
    path = tmp_path_factory.mktemp("cut") / "m.gguf"
    path.write_bytes(whole)
    expected = read_footprint(path)
    path.write_bytes(whole[: start + cut])
    found = read_footprint(path)
    assert (found.layers, found.dense_bytes) == (expected.layers, expected.dense_bytes)
    assert [t.size_bytes for t in found.metadata.tensors] == [t.size_bytes for t in expected.metadata.tensors]


def test_damage_is_still_seen_without_data(tmp_path: Path) -> None:
    shape = dict(SHAPES[0], n_embd=4096)
    path = _write_header(shape, tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    at = data.rindex(b"output.weight") + len(b"output.weight") + 4 + 16 + 4
    data[at : at + 8] = bytes(8)  # its data now begin where the first tensor's do
    path.write_bytes(data)
    assert "overlap" in str(refusal(lambda: open_model(path, need_data=False)))


def test_an_unknown_type_in_the_last_place_has_no_size_without_data(tmp_path: Path) -> None:
    tensors = [*synth.moe_tensors(), Tensor("output.weight", (32, 8), 153, bytes(640))]
    model = Gguf(synth.moe_entries(), tensors)
    path = model.write(tmp_path / "m.gguf")
    error = refusal(lambda: open_model(path, need_data=False))
    assert error.tensor == "output.weight"
    assert open_model(path).tensors[-1].size_is_guessed


def test_any_shard_of_a_split_set_whose_data_are_missing(tmp_path: Path) -> None:
    model = synth.moe()
    whole = read_footprint(model.write(tmp_path / "whole.gguf"))
    for name, shard in synth.split(model, [0, 6, len(model.tensors) - 6]).items():
        blob = shard.blob()
        (tmp_path / name).write_bytes(blob[: min(shard.offsets.values(), default=len(blob))])
    for number in (1, 2, 3):
        found = read_footprint(tmp_path / f"model-{number:05d}-of-00003.gguf")
        assert (found.layers, found.dense_bytes) == (whole.layers, whole.dense_bytes)


def test_a_bundle_fits_as_its_source_does(tmp_path: Path, example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = open_model(example)
    layout = plan_layout(model, "tiny", ple="auto", shard_bytes=45 * 10**9)
    convert(model, layout, tmp_path / "tiny.bel", force=False, check=True, progress=lambda *_: None)
    arguments = ("--ram", "40M", "--context", "512")
    answer, _ = fit_answer(capsys, tmp_path / "tiny.bel", *arguments)
    assert answer == fit_answer(capsys, example, *arguments)[0]
    assert set(answer["expert_stride_bytes"].values()) == {layout.layers[0].stride_bytes}


def test_per_layer_embeddings_stay_on_the_disk(tmp_path: Path) -> None:
    table = Tensor("per_layer_token_embd.weight", (32, 8), F32)
    with_table = read_footprint(Gguf(synth.moe_entries(), [table, *synth.moe_tensors()]).write(tmp_path / "m.gguf"))
    without = read_footprint(synth.moe().write(tmp_path / "n.gguf"))
    assert with_table.ple_bytes == 32 * 8 * 4
    assert with_table.dense_bytes == without.dense_bytes


def test_experts_of_mtp_blocks_get_no_slots(tmp_path: Path) -> None:
    entries = [*arch_entries("glm4moe", {"block_count": 2, "nextn_predict_layers": 1, "expert_used_count": 2})]
    model = read_footprint(Gguf(entries, synth.moe_tensors()).write(tmp_path / "m.gguf"))
    assert [layer.layer for layer in model.reached] == [0]
    assert [layer.layer for layer in model.layers] == [0, 1]
    only = arch_entries("glm4moe", {"block_count": 1, "nextn_predict_layers": 1, "expert_used_count": 2})
    path = Gguf(only, expert_stacks(0, 4)).write(tmp_path / "mtp.gguf")
    assert type(refusal(lambda: read_footprint(path))) is BadInputError


def test_a_header_that_ends_before_its_padding_is_enough(tmp_path: Path) -> None:
    model = Path(__file__).parent.parent / "examples" / "tiny-moe-q8_0.gguf"
    header = scan_header(model)
    end = header.data_start_bytes
    data = model.read_bytes()[:end]
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data.rstrip(b"\0").ljust(end - 1, b"\0"))  # at least one byte of padding is gone, no tensor info is
    with pytest.raises(BadInputError):
        open_model(cut)
    assert len(open_model(cut, need_data=False).tensors) == len(header.tensors)
