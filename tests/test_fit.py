"""`bel-profile fit`: sizes worked out apart from the code or read from llama.cpp's own log, and what a command answers."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shlex
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

import archs
import synth
from bel.formats.console import run_command
from bel.formats.errors import BadInputError, UsageError
from bel.formats.experts_file import blob_layout
from bel.formats.gguf_compose import compose
from bel.formats.gguf_header import scan_header
from bel.formats.gguf_model import open_model
from bel.formats.units import GIB, MIB, parse_bytes
from bel.profiler.compute_buffer import compute_bytes
from bel.profiler.fit import Fit, Question, largest_slots, least_slots, memory_for, slots_bytes, solve, spread
from bel.profiler.fit_cli import fit_command
from bel.profiler.fit_json import fit_json
from bel.profiler.fit_words import advice, size_option, verdict
from bel.profiler.footprint import Footprint, SlotLayer, read_footprint
from bel.profiler.kv_cache import cache_bytes
from bel.repack.convert import convert
from bel.repack.layout import plan_layout
from bel.runtime.engine import Engine, Model
from bel.runtime.options_cli import run_options
from bel.runtime.run_options import RunOptions
from refused import refusal
from synth import ARRAY, BOOL, F32, I32, STRING, U32, Gguf, Tensor, expert_stacks, key

SHAPES = json.loads((Path(__file__).parent / "data_fit" / "shapes.json").read_text(encoding="utf-8"))
TYPES = {"Q4_K": (12, 256, 144), "Q8_0": (8, 32, 34), "MXFP4": (39, 32, 17)}  # id, elements and bytes of a block (ggml.h)
JSON_KEYS = {
    "vram_bytes",
    "ram_bytes",
    "dense_bytes",
    "kv_bytes",
    "compute_bytes",
    "slots_total",
    "slots_per_layer",
    "resident_fraction",
    "verdict",
    "advice",
}
Keys = dict[str, Any]


def _entries(arch: str, keys: Keys) -> list[bytes]:
    """Metadata of an architecture: ints as u32, lists of bools or ints as arrays."""
    entries = [key("general.architecture", STRING, arch), key("general.name", STRING, arch)]
    for name, value in keys.items():
        kind = ARRAY if isinstance(value, list) else U32
        made = (BOOL if isinstance(value[0], bool) else I32, value) if isinstance(value, list) else value
        entries.append(key(f"{arch}.{name}", kind, made))
    return entries


def _header(path: Path, arch: str, keys: Keys) -> Path:
    """A model of an architecture with real metadata, and tensors that are only there to be a model."""
    tensors = [Tensor("token_embd.weight", (32, 8), F32), *expert_stacks(0, 4)]
    return Gguf(_entries(arch, {"embedding_length": 32} | keys), tensors).write(path)


def _run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = run_command(fit_command, "bel-profile", [str(a) for a in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def _json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[dict[str, Any], str]:
    status, out, err = _run(capsys, *arguments, "--json")
    assert status == 0, err
    answer = json.loads(out)
    assert answer.keys() >= JSON_KEYS
    return answer, err


# Caches: numbers worked out by hand from the rules that the comment beside each names.

QWEN3_30B = {
    "block_count": 48,
    "attention.head_count": 32,
    "attention.head_count_kv": 4,
    "attention.key_length": 128,
    "attention.value_length": 128,
}
MLA = {
    "attention.head_count_kv": 1,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
    "attention.kv_lora_rank": 512,
}
GPT_OSS = QWEN3_30B | {"block_count": 24, "attention.sliding_window": 128}
GPT_OSS |= {"attention.head_count_kv": 8, "attention.key_length": 64, "attention.value_length": 64}
GEMMA4 = QWEN3_30B | {
    "block_count": 6,
    "attention.head_count_kv": 2,
    "attention.key_length": 512,
    "attention.value_length": 512,
    "attention.key_length_swa": 256,
    "attention.value_length_swa": 256,
    "attention.sliding_window": 1024,
    "attention.sliding_window_pattern": [True, True, True, True, True, False],
}
QWEN3NEXT = {
    "block_count": 48,
    "attention.head_count": 16,
    "attention.head_count_kv": 2,
    "attention.key_length": 256,
    "attention.value_length": 256,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 4096,
    "ssm.state_size": 128,
    "ssm.group_count": 16,
}
DELTA_STATE = 4 * (3 * (4096 + 2 * 16 * 128) + 128 * 4096)  # f32: three columns of the convolution, and the state
KDA = MLA | {"block_count": 4, "attention.head_count": 8, "ssm.conv_kernel": 4, "kda.head_dim": 128}
KDA_STATE = 4 * (3 * 3 * 8 * 128 + 8 * 128 * 128)
CASES: list[tuple[str, Keys, int, str, int, int]] = [
    # arch, keys, context, type, bytes that grow with the context, bytes of states
    ("qwen3moe", QWEN3_30B, 8192, "f16", 8192 * 48 * 4 * (128 + 128) * 2, 0),
    ("qwen3moe", QWEN3_30B, 8192, "q8_0", 8192 * 48 * 2 * (4 * 128 // 32 * 34), 0),
    ("qwen3moe", QWEN3_30B, 8192, "q4_0", 8192 * 48 * 2 * (4 * 128 // 32 * 18), 0),
    ("qwen3moe", QWEN3_30B, 8192, "f32", 8192 * 48 * 4 * (128 + 128) * 4, 0),
    ("qwen3moe", QWEN3_30B, 1000, "f16", 1000 * 48 * 4 * (128 + 128) * 2, 0),
    ("qwen3moe", QWEN3_30B | {"nextn_predict_layers": 1}, 512, "f16", 512 * 47 * 4 * 256 * 2, 0),
    # The default length is embedding_length / head_count; value_length may differ from key_length.
    (
        "llama",
        {"block_count": 2, "embedding_length": 96, "attention.head_count": 3},
        256,
        "f16",
        256 * 2 * 3 * (32 + 32) * 2,
        0,
    ),
    ("llama", QWEN3_30B | {"attention.value_length": 64}, 256, "f16", 256 * 48 * 4 * (128 + 64) * 2, 0),
    ("llama", QWEN3_30B | {"block_count": 3, "attention.head_count_kv": [4, 0, 2]}, 256, "f16", 256 * (4 + 2) * 256 * 2, 0),
    # Multi-head latent attention keeps one compressed row and no values; without its keys the same model keeps both.
    ("deepseek2", MLA | {"block_count": 61, "attention.head_count": 128}, 4096, "f16", 4096 * 61 * 576 * 2, 0),
    ("deepseek2", MLA | {"block_count": 61, "attention.head_count": 128}, 4096, "q8_0", 4096 * 61 * (576 // 32 * 34), 0),
    ("deepseek2", {**QWEN3_30B, "attention.key_length": 192}, 256, "f16", 256 * 48 * 4 * (192 + 128) * 2, 0),
    # Every second layer of gpt-oss sees 128 tokens: 128 + 512 of a ubatch, rounded up to 256, are 768 cells.
    ("gpt-oss", GPT_OSS, 8192, "f16", (12 * 8192 + 12 * 768) * 8 * 128 * 2, 0),
    ("gpt-oss", GPT_OSS, 512, "f16", 24 * 512 * 8 * 128 * 2, 0),
    ("gpt-oss", GPT_OSS | {"attention.sliding_window_pattern": [True] * 23 + [False]}, 8192, "f16", 25856 * 8 * 128 * 2, 0),
    ("gpt-oss", GPT_OSS | {"attention.sliding_window_pattern": 3}, 8192, "f16", (8 * 8192 + 16 * 768) * 8 * 128 * 2, 0),
    # Cohere's and Laguna's first layer of four is the one that sees everything, of 6 layers two are.
    ("laguna", GPT_OSS | {"block_count": 6}, 8192, "f16", (2 * 8192 + 4 * 768) * 8 * 128 * 2, 0),
    ("laguna", GPT_OSS | {"block_count": 6, "attention.sliding_window": 0}, 8192, "f16", 6 * 8192 * 8 * 128 * 2, 0),
    ("mellum", GPT_OSS | {"block_count": 6}, 8192, "f16", (1 * 8192 + 5 * 768) * 8 * 128 * 2, 0),
    # Llama 4 has chunks of 8192 even where the file says nothing: 8192 + 512, rounded up, are 8704 cells.
    ("llama4", QWEN3_30B, 32768, "f16", (12 * 32768 + 36 * 8704) * 4 * 256 * 2, 0),
    ("smallthinker", GPT_OSS | {"block_count": 4}, 16384, "f16", (1 * 16384 + 3 * 4608) * 8 * 128 * 2, 0),
    # Gemma 4's heads differ by layer, and the last layers may share the caches of earlier ones.
    ("gemma4", GEMMA4, 4096, "f16", 5 * 1536 * 2 * 512 * 2 + 4096 * 2 * 1024 * 2, 0),
    ("gemma4", GEMMA4 | {"attention.shared_kv_layers": 2}, 4096, "f16", 4 * 1536 * 2 * 512 * 2, 0),
    # Hybrids: every fourth layer has attention, or those with key heads have; the others keep a state.
    ("qwen3next", QWEN3NEXT, 4096, "f16", 4096 * 12 * 2 * 512 * 2, 36 * DELTA_STATE),
    ("qwen35moe", QWEN3NEXT | {"full_attention_interval": 8}, 4096, "f16", 4096 * 6 * 2 * 512 * 2, 42 * DELTA_STATE),
    ("kimi-linear", KDA | {"attention.head_count_kv": [0, 0, 0, 1]}, 1024, "f16", 1024 * 576 * 2, 3 * KDA_STATE),
    # Sparse attention: an indexer's keys beside the compressed rows, in MiniMax M3 its values too.
    (
        "glm-dsa",
        MLA | {"block_count": 4, "attention.head_count": 64, "attention.indexer.key_length": 128},
        1024,
        "f16",
        1024 * 4 * (576 + 128) * 2,
        0,
    ),
    (
        "minimax-m3",
        QWEN3_30B | {"block_count": 4, "leading_dense_block_count": 1, "attention.indexer.key_length": 64},
        1024,
        "f16",
        1024 * (4 * 4 * 256 + 3 * (64 + 128)) * 2,
        0,
    ),
    # DeepSeek V4: raw rows in a window of 128 + 512, 1 in 4 and 1 in 128 tokens compressed (each rounded up to 256 cells), an
    # indexer where it is 1 in 4; states of 8 tokens at double width and of 128 tokens, each twice in f32.
    (
        "deepseek4",
        {
            "block_count": 3,
            "attention.head_count": 8,
            "attention.key_length": 64,
            "attention.sliding_window": 128,
            "attention.compress_ratios": [0, 4, 128],
            "attention.indexer.key_length": 128,
        },
        8192,
        "f16",
        2 * (3 * 768 * 64 + 2048 * 64 + 256 * 64 + 2048 * 128),
        2 * 4 * (8 * 2 * 64 + 8 * 2 * 128 + 128 * 64),
    ),
    ("llada-moe", QWEN3_30B, 1024, "f16", 0, 0),  # diffusion: nothing is kept
]


@pytest.mark.parametrize(("arch", "keys", "context", "cache_type", "kv_bytes", "state_bytes"), CASES)
def test_cache_bytes(
    tmp_path: Path, arch: str, keys: Keys, context: int, cache_type: str, kv_bytes: int, state_bytes: int
) -> None:
    model = open_model(_header(tmp_path / "m.gguf", arch, keys))
    found = cache_bytes(model, context, cache_type)
    assert (found.kv_bytes, found.state_bytes) == (kv_bytes, state_bytes)


def test_rounding_of_the_context_is_a_line_of_its_own(tmp_path: Path) -> None:
    model = open_model(_header(tmp_path / "m.gguf", "qwen3moe", QWEN3_30B))
    assert cache_bytes(model, 1000, "f16").padding_bytes == 24 * 48 * 4 * 256 * 2
    assert cache_bytes(model, 1024, "f16").padding_bytes == 0


def test_a_type_that_llama_cpp_refuses_is_refused(tmp_path: Path) -> None:
    model = open_model(_header(tmp_path / "m.gguf", "qwen3moe", QWEN3_30B | {"attention.key_length": 80}))
    error = refusal(lambda: cache_bytes(model, 512, "q8_0"), UsageError)
    assert "80" in str(error)
    assert cache_bytes(model, 512, "f16").kv_bytes == 512 * 48 * 4 * (80 + 128) * 2


@pytest.mark.parametrize("keys", [{}, {"block_count": 600}, {"block_count": 2, "nextn_predict_layers": 3}])
def test_metadata_that_do_not_tell_are_refused(tmp_path: Path, keys: Keys) -> None:
    path = _header(tmp_path / "m.gguf", "qwen3moe", keys)
    error = refusal(lambda: cache_bytes(open_model(path), 512, "f16"))
    assert "block_count" in str(error)


def test_an_array_that_is_too_short_is_refused(tmp_path: Path) -> None:
    keys = GEMMA4 | {"attention.sliding_window_pattern": [True]}
    error = refusal(lambda: cache_bytes(open_model(_header(tmp_path / "m.gguf", "gemma4", keys)), 512, "f16"))
    assert "sliding_window_pattern" in str(error)


# Caches and buffers: what llama.cpp itself says when it allocates them.


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """llama.cpp, with its whole log kept."""
    engine = Engine.open()
    monkeypatch.setattr(engine, "log", deque())
    yield engine


def _allocated(engine: Engine, model: Model, n_ctx: int, cache_type: int) -> str | None:
    """The log of a context that is made and freed, with a cache of a type; None where llama.cpp refuses."""
    ffi, lib = engine.library.ffi, engine.library.lib
    params = ffi.new("struct any_params *", lib.llama_context_default_params())
    fields = ffi.cast(f"struct {engine.library.context_params} *", params)
    fields.n_ctx, fields.n_batch, fields.n_ubatch = n_ctx, 512, 512
    fields.n_threads = fields.n_threads_batch = 1
    fields.type_k = fields.type_v = cache_type
    fields.swa_full = False
    engine.log.clear()
    pointer = lib.llama_init_from_model(model._pointer, params[0])
    if pointer == ffi.NULL:
        return None
    lib.llama_free(pointer)
    return "\n".join(line for _, line in engine.log)


def _logged(log: str, what: str) -> list[float]:
    """The figures of a buffer's lines, in MiB to two decimals."""
    return [float(x) for x in re.findall(rf"{what} buffer size = +([\d.]+) MiB", log)]


def _agrees(found_bytes: int, logged: Sequence[float]) -> bool:
    return abs(found_bytes / MIB - sum(logged)) <= 0.00501 * len(logged)


@pytest.mark.parametrize("n_embd", [64, 128])
@pytest.mark.parametrize("arch", sorted(archs.ARCHS))
def test_caches_and_buffer_are_what_llama_cpp_allocates(engine: Engine, tmp_path: Path, arch: str, n_embd: int) -> None:
    """Heads of 16 elements (q8_0 is refused by both) and of 32."""
    path = archs.make_model(arch, tmp_path / "m.gguf", n_embd=n_embd)
    model = open_model(path)
    with engine.load(path) as loaded:
        for context in (256, 512, 4096):
            for name, type_id in (("f16", 1), ("q8_0", 8), ("q4_0", 2)):
                log = _allocated(engine, loaded, context, type_id)
                if log is None:
                    refusal(lambda c=context, n=name: cache_bytes(model, c, n), UsageError)  # type: ignore[misc]
                    continue
                found = cache_bytes(model, context, name)
                assert _agrees(found.kv_bytes, _logged(log, "KV")), (context, name)
                assert _agrees(found.state_bytes, _logged(log, "(?:RS|state)")), (context, name)
                if name == "f16":
                    assert 0.75 <= compute_bytes(model, context) / MIB / _logged(log, "compute")[-1] <= 1.65


@pytest.mark.parametrize("context", [512, 2048, 8192, 32768])
def test_compute_buffer_of_a_trained_model(engine: Engine, example: Path, context: int) -> None:
    with engine.load(example) as loaded:
        log = _allocated(engine, loaded, context, 1)
    assert log is not None
    assert 1.0 <= compute_bytes(open_model(example), context) / MIB / _logged(log, "compute")[-1] <= 1.15


# Headers without data.


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
    entries = _entries(shape["gguf_arch"], _shape_keys(shape))
    tokens = [f"token{i}" for i in range(shape["vocab"])]
    entries.append(key("tokenizer.ggml.tokens", ARRAY, (STRING, tokens)))
    path.write_bytes(compose(3, 32, entries, tensors).header() + more)
    return path


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape["name"])
def test_header_of_every_published_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: dict[str, Any]) -> None:
    path = _write_header(shape, tmp_path / "m.gguf")
    answer, _ = _json(capsys, path, "--vram", "24G", "--ram", "64G")
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
    answer, _ = _json(capsys, _write_header(shape, tmp_path / "m.gguf"), "--vram", "12G", "--ram", "4G")
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
    answer, _ = _json(capsys, tmp_path / "tiny.bel", *arguments)
    assert answer == _json(capsys, example, *arguments)[0]
    assert set(answer["expert_stride_bytes"].values()) == {layout.layers[0].stride_bytes}


def test_per_layer_embeddings_stay_on_the_disk(tmp_path: Path) -> None:
    table = Tensor("per_layer_token_embd.weight", (32, 8), F32)
    with_table = read_footprint(Gguf(synth.moe_entries(), [table, *synth.moe_tensors()]).write(tmp_path / "m.gguf"))
    without = read_footprint(synth.moe().write(tmp_path / "n.gguf"))
    assert with_table.ple_bytes == 32 * 8 * 4
    assert with_table.dense_bytes == without.dense_bytes


def test_experts_of_mtp_blocks_get_no_slots(tmp_path: Path) -> None:
    entries = [*_entries("glm4moe", {"block_count": 2, "nextn_predict_layers": 1, "expert_used_count": 2})]
    model = read_footprint(Gguf(entries, synth.moe_tensors()).write(tmp_path / "m.gguf"))
    assert [layer.layer for layer in model.reached] == [0]
    assert [layer.layer for layer in model.layers] == [0, 1]
    only = _entries("glm4moe", {"block_count": 1, "nextn_predict_layers": 1, "expert_used_count": 2})
    path = Gguf(only, expert_stacks(0, 4)).write(tmp_path / "mtp.gguf")
    assert type(refusal(lambda: read_footprint(path))) is BadInputError


# Slots.

layer_lists = st.lists(
    st.tuples(st.integers(1, 64), st.integers(1, 8), st.integers(1, 5)).map(
        lambda x: SlotLayer(0, max(x[0], x[1]), x[1], 4096 * x[2], 4000 * x[2], 8000, True)
    ),
    min_size=1,
    max_size=6,
)


@given(layers=layer_lists, room=st.integers(-1, 6 * 64 * 5 * 4096))
def test_the_largest_number_of_slots_is_the_largest(layers: list[SlotLayer], room: int) -> None:
    fitting = [n for n in range(1, 65) if slots_bytes(layers, spread(layers, n)) <= room]
    found = largest_slots(layers, room)
    if not fitting:
        assert found == 0
    else:
        assert slots_bytes(layers, spread(layers, found)) <= room
        assert spread(layers, found) == spread(layers, max(fitting))


@given(layers=layer_lists, share=st.sampled_from([0.15, 0.2, 0.5, 1.0]))
def test_the_least_slots_of_a_share_are_the_least(layers: list[SlotLayer], share: float) -> None:
    experts = sum(x.n_expert for x in layers)
    enough = [n for n in range(1, 65) if sum(spread(layers, n)) / experts >= share]
    assert spread(layers, least_slots(layers, share)) == spread(layers, min(enough))


def _model(tmp_path: Path, *, experts: int = 40, used: int = 4, blocks: int = 2) -> Path:
    """A model with slots of 8 KiB (three parts of 2176 bytes)."""
    keys = QWEN3_30B | {"block_count": blocks, "expert_used_count": used, "embedding_length": 32, "context_length": 8192}
    tensors = [Tensor("token_embd.weight", (32, 8), F32)]
    tensors += [t for block in range(blocks) for t in expert_stacks(block, experts)]
    return Gguf(_entries("qwen3moe", keys), tensors).write(tmp_path / "m.gguf")


def test_more_slots_than_fit_is_an_error_that_names_how_many_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _model(tmp_path)
    budget = 2 * 7 * 8192 + 8191
    status, out, err = _run(capsys, path, "--vram", "1G", "--ram", "1G", "--slots", 8, "--slots-bytes", budget, "--json")
    assert (status, out) == (2, "")
    assert re.search(r"slots that fits is 7\b", err)
    answer, err = _json(capsys, path, "--vram", "1G", "--ram", "1G", "--slots-bytes", budget)
    assert answer["slots_per_layer"] == {"0": 7, "1": 7}
    assert err == ""
    answer, _ = _json(capsys, path, "--vram", "1G", "--ram", "1G", "--slots", 7, "--slots-bytes", budget)
    assert answer["slots_total"] == 14


def test_slots_that_do_not_fit_in_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _model(tmp_path)
    model = read_footprint(path)
    free = solve(model, Question(0, GIB))
    ram = memory_for(free, 2 * 10 * 8192)
    answer, _ = _json(capsys, path, "--ram", ram)
    assert answer["slots_per_layer"] == {"0": 10, "1": 10}
    status, _, err = _run(capsys, path, "--ram", ram, "--slots", 11)
    assert status == 2
    assert re.search(r"slots that fits is 10\b", err)


def test_the_largest_number_that_fits_may_be_all_since_then_there_is_no_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _model(tmp_path)
    first = solve(read_footprint(path), Question(GIB, GIB))
    sizes = ("--vram", memory_for(first, first.experts_bytes), "--ram", "1G")
    most = {n: _run(capsys, path, *sizes, "--slots", n) for n in range(4, 41)}
    refused = [n for n, (status, _, _) in most.items() if status]
    assert refused == list(range(refused[0], 40))
    for n in refused:
        assert most[n][0] == 2
        assert re.search(r"slots that fits is 40\b", most[n][2])
        if refused[0] > 4:
            assert f"at most {refused[0] - 1} fit" in most[n][2]
    less = ("--vram", memory_for(first, first.experts_bytes) - 1, "--ram", "1G")
    assert not re.search(r"slots that fits is 40\b", _run(capsys, path, *less, "--slots", refused[0])[2])


def test_asked_for_slots_where_not_even_top_k_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = _run(capsys, _model(tmp_path), "--ram", "1M", "--slots", 4)
    assert status == 2
    assert "Not even top-4" in err


def test_slots_below_top_k_and_above_the_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _model(tmp_path)
    status, _, err = _run(capsys, path, "--ram", "1G", "--slots", 3)
    assert status == 2
    assert "top-4" in err
    answer, err = _json(capsys, path, "--ram", "1G", "--slots", 99)
    assert answer["slots_per_layer"] == {"0": 40, "1": 40}
    assert re.search(r"\b40 experts\b", err)
    assert answer["resident_fraction"] == 1


def test_a_budget_below_the_floor_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _model(tmp_path)
    floor = 2 * 4 * 8192
    status, _, err = _run(capsys, path, "--ram", "1G", "--slots-bytes", floor - 1)
    assert status == 2
    assert str(floor) in err
    answer, _ = _json(capsys, path, "--ram", "1G", "--slots-bytes", floor)
    assert answer["slots_total"] == 8


def test_a_budget_above_what_is_left_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _model(tmp_path)
    ram = memory_for(solve(read_footprint(path), Question(0, GIB)), 2 * 10 * 8192)
    answer, err = _json(capsys, path, "--ram", ram, "--slots-bytes", "1G")
    assert answer["slots_per_layer"] == {"0": 10, "1": 10}
    assert "--slots-bytes" in err


# Words.


def _at(model: Footprint, share: float, **question: Any) -> Fit:
    """The fit of a model in memory for a share of its experts."""
    first = solve(model, Question(0, GIB, **question))
    return solve(model, dataclasses.replace(first.question, ram_bytes=memory_for(first, int(share * first.experts_bytes))))


def test_the_verdict_follows_the_resident_share(tmp_path: Path) -> None:
    model = read_footprint(_model(tmp_path, experts=100))
    assert "no longer the right policy" in verdict(_at(model, 0.149))
    assert "doubtful" in verdict(_at(model, 0.15))
    assert "doubtful" in verdict(_at(model, 0.199))
    assert "sound choice" in verdict(_at(model, 0.2))
    assert "one token cycle" in verdict(_at(model, 0.04))
    assert "one token cycle" not in verdict(_at(model, 0.05))
    whole = _at(model, 1.0)
    assert "Everything fits in RAM" in verdict(whole)
    assert advice(whole) == []


def test_the_verdict_with_a_gpu_says_what_was_measured(tmp_path: Path) -> None:
    model = read_footprint(_model(tmp_path, experts=100, blocks=40))
    first = solve(model, Question(GIB, 64 * GIB, 512))
    said = {}
    for slots in (14, 15, 19, 20, 50):
        vram = memory_for(first, slots_bytes(model.reached, (slots,) * 40))
        fit = solve(model, Question(vram, 64 * GIB, 512))
        assert fit.slots == (slots,) * 40
        said[slots] = verdict(fit)
    for slots in (20, 50):
        assert "bel-run --gpu tries the ways" in said[slots]
        assert "slowest of the pool's ways" in said[slots]
        assert "sound choice" not in said[slots]
    for slots in (15, 19):
        assert "doubtful" in said[slots]
    assert "no longer the right policy" in said[14]
    assert "lfu-decay:0.98 (bel-run's default) or LRU" in said[14]
    assert not any("repick" in words for words in said.values())


def test_what_does_not_fit_says_how_much_is_missing_and_what_would_help(tmp_path: Path) -> None:
    model = read_footprint(_model(tmp_path))
    fit = _at(model, 0.09)  # the floor is 0.1
    assert not fit.fits
    assert sum(fit.slots) == 0
    assert "Does not fit" in verdict(fit)
    assert "LRU hits nothing" in verdict(fit)
    words = " ".join(advice(fit))
    assert "--kv q8_0" in words
    assert "--context 4096" in words
    assert "for the floor" in words


def test_advised_memory_is_the_least_that_works(tmp_path: Path) -> None:
    model = read_footprint(_model(tmp_path))
    for vram in (0, GIB, 64 * GIB):
        first = solve(model, Question(vram, 64 * GIB))
        need = memory_for(first, first.floor_bytes)
        change = {"vram_bytes": need} if vram else {"ram_bytes": need}
        less = {name: size - 1 for name, size in change.items()}
        assert solve(model, dataclasses.replace(first.question, **change)).fits
        assert not solve(model, dataclasses.replace(first.question, **less)).fits


def test_a_stage_is_counted_where_a_prompt_needs_one(tmp_path: Path) -> None:
    """In VRAM alone, and not where all experts have slots; more memory never gives fewer slots."""
    model = read_footprint(_model(tmp_path, experts=64, blocks=40))
    whole = solve(model, Question(64 * GIB, GIB, 256))
    assert (whole.resident_fraction, whole.stage_bytes) == (1, 0)
    assert solve(model, Question(0, 45 * MIB, 256)).stage_bytes == 0
    layer = 64 * model.reached[0].weights_bytes
    assert solve(model, Question(64 * GIB, GIB, 256, slots=63)).stage_bytes == layer
    assert solve(model, Question(64 * GIB, GIB, 256, slots_bytes=whole.experts_bytes - 1)).stage_bytes == layer
    before = -1
    for vram in range(20 * MIB, 2 * memory_for(whole, whole.experts_bytes), MIB):
        fit = solve(model, Question(vram, GIB, 256))
        assert fit.stage_bytes == (0 if fit.resident_fraction == 1 else layer)
        assert sum(fit.slots) >= before
        before = sum(fit.slots)


def test_an_advised_size_can_be_copied_into_the_command(tmp_path: Path) -> None:
    model = read_footprint(_model(tmp_path, experts=64, blocks=40))
    for vram in (0, 40 * MIB):
        fit = solve(model, Question(vram, 45 * MIB, 256))
        assert 0 < fit.resident_fraction < 1
        (words,) = [w for w in advice(fit) if w.startswith("More memory")]
        (size,) = re.findall(r"(\S+) for all experts", words)
        change = {"vram_bytes" if vram else "ram_bytes": parse_bytes(size)}
        assert solve(model, dataclasses.replace(fit.question, **change)).resident_fraction == 1


@st.composite
def footprints(draw: st.DrawFn) -> Footprint:
    """Weights of any shape on the metadata of a small model."""
    layers = tuple(dataclasses.replace(layer, layer=i) for i, layer in enumerate(draw(layer_lists)))
    scale = draw(st.sampled_from([1, 7, 300]))
    layers = tuple(
        dataclasses.replace(x, stride_bytes=x.stride_bytes * scale, weights_bytes=x.weights_bytes * scale) for x in layers
    )
    dense, table = draw(st.integers(0, GIB)), draw(st.integers(0, GIB))
    return dataclasses.replace(
        _plain_footprint(), dense_bytes=dense + table, input_bytes=table, is_tied=draw(st.booleans()), layers=layers
    )


@functools.cache
def _plain_footprint() -> Footprint:
    with tempfile.TemporaryDirectory() as folder:
        return read_footprint(_model(Path(folder)))


@st.composite
def fits(draw: st.DrawFn) -> Fit:
    """The answer for random weights, contexts and sizes, around what the weights need."""
    model, context = draw(footprints()), draw(st.integers(1, 40_000))
    first = solve(model, Question(GIB if draw(st.booleans()) else 0, draw(st.integers(0, 4 * GIB)), context))
    size = memory_for(first, int(first.experts_bytes * draw(st.floats(0, 1.2)))) - draw(st.sampled_from([0, 1, MIB, GIB]))
    name = "vram_bytes" if first.is_gpu else "ram_bytes"
    question = dataclasses.replace(first.question, **{name: max(size, 1)})
    if draw(st.booleans()):
        least = slots_bytes(model.reached, [x.top_k for x in model.reached])
        question = dataclasses.replace(question, slots_bytes=draw(st.integers(least, 2 * first.experts_bytes)))
    return solve(model, question)


@given(fit=fits())
def test_memory_less_the_terms_of_the_json_is_what_is_left(fit: Fit) -> None:
    answer = fit_json(fit, "", [])
    terms = ("gpu_dense", "kv", "kv_padding", "state", "compute", "margin", "stage", "slots")
    memory = answer["vram_bytes"] or answer["ram_bytes"]
    assert answer["left_bytes"] == memory - sum(answer[f"{term}_bytes"] for term in terms)
    assert answer["dense_bytes"] == fit.model.dense_bytes
    moved = answer["input_bytes"]
    assert moved == (fit.model.input_bytes if fit.is_gpu else 0)
    assert answer["gpu_dense_bytes"] == answer["dense_bytes"] - (0 if fit.model.is_tied else moved)
    if fit.question.slots_bytes is None:
        assert answer["left_for_slots_bytes"] == max(0, answer["left_bytes"] + answer["slots_bytes"])


SHARES = {"the floor": 0.0, "20 % of the experts": 0.2, "50 % of the experts": 0.5, "all experts": 1.0}


def _advised(fit: Fit, start: str) -> dict[str, int]:
    """The sizes of a line of advice, each with what it is for."""
    lines = [words for words in advice(fit) if words.startswith(start)]
    return {aim: parse_bytes(size) for words in lines for size, aim in re.findall(rf"(\S+) for ({'|'.join(SHARES)})", words)}


@given(fit=fits())
def test_every_advised_size_reaches_what_it_promised(fit: Fit) -> None:
    free = dataclasses.replace(fit.question, slots_bytes=None)
    name = "vram_bytes" if fit.is_gpu else "ram_bytes"
    for aim, size in _advised(fit, "More memory").items():
        again = solve(fit.model, dataclasses.replace(free, **{name: size}))
        assert size > fit.memory_bytes
        assert again.fits
        assert again.resident_fraction >= SHARES[aim]
        if SHARES[aim] == 1:
            assert "Everything fits" in verdict(again)
        elif SHARES[aim]:
            assert "doubtful" not in verdict(again)
            assert "no longer the right policy" not in verdict(again)
    for words in advice(fit):
        for size in re.findall(r"--ram (\S+) holds all experts", words):
            again = solve(fit.model, dataclasses.replace(fit.question, ram_bytes=parse_bytes(size)))
            assert again.on_disk_bytes == 0


def test_advice_tells_every_share_that_is_not_reached(tmp_path: Path) -> None:
    model = read_footprint(_model(tmp_path, experts=100))
    assert list(_advised(_at(model, 0.19), "More memory")) == ["20 % of the experts", "50 % of the experts", "all experts"]
    assert list(_advised(_at(model, 0.2), "More memory")) == ["50 % of the experts", "all experts"]
    assert "the floor" in _advised(_at(model, 0.01), "More memory")


def test_advice_on_a_question_with_slots_says_to_leave_them_out(tmp_path: Path) -> None:
    model = read_footprint(_model(tmp_path, experts=100))
    fit = _at(model, 0.1)
    (words,) = [w for w in advice(solve(model, dataclasses.replace(fit.question, slots=8))) if w.startswith("More memory")]
    assert words.endswith("(without --slots).")
    assert not any("without --slots" in w for w in advice(fit))


# The command that runs what was computed.


@click.command()
@run_options
def _parsed(options: RunOptions) -> RunOptions:
    """What bel-run makes of its command line."""
    return options


def _run_it_so(answer: dict[str, Any], engine: Path) -> RunOptions | None:
    lines = [words for words in answer["advice"] if words.startswith("Run it so: ")]
    if not lines:
        return None
    words = shlex.split(lines[0].removeprefix("Run it so: ").replace("FOLDER", shlex.quote(str(engine))))
    assert words[0] == "bel-run"
    options = _parsed.main(words[1:], standalone_mode=False)
    assert isinstance(options, RunOptions)
    return options


def test_bel_run_understands_the_line_that_runs_it(tmp_path: Path, example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "a bundle.bel"
    layout = plan_layout(open_model(example), "tiny", ple="auto", shard_bytes=45 * 10**9)
    convert(open_model(example), layout, bundle, force=False, check=True, progress=lambda *_: None)
    sizes = ("--vram", "17M", "--ram", "2M", "--context", "700")
    answer, _ = _json(capsys, bundle, *sizes)
    options = _run_it_so(answer, tmp_path)
    assert options is not None
    assert options.path == bundle
    assert (options.gpu, options.n_ctx) == ("auto", 700)
    assert {options.slots} == set(answer["slots_per_layer"].values())
    assert answer["experts_on_disk_bytes"] > 0
    assert options.ram_bytes == MIB  # what is left of 2 MiB, less the margin of an eighth, in whole MiB
    of_gguf = _run_it_so(_json(capsys, example, *sizes)[0], tmp_path)
    assert of_gguf == dataclasses.replace(options, path=Path("BUNDLE"))
    plenty = _run_it_so(_json(capsys, bundle, "--vram", "17M", "--ram", "1G", "--context", "700")[0], tmp_path)
    assert plenty == dataclasses.replace(options, ram_bytes=None)


def test_no_line_runs_a_cache_that_bel_run_does_not_have(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kv, said in (("f16", False), ("q8_0", True), ("f32", True)):
        answer, _ = _json(capsys, example, "--vram", "17M", "--ram", "1G", "--context", "512", "--kv", kv)
        assert 0 < answer["resident_fraction"] < 1
        assert any(words.startswith("Run it so") for words in answer["advice"]) is not said
        assert any("llama.cpp's own programs" in w and f"--kv {kv}" in w for w in answer["advice"]) is said


@given(count=st.integers(1, 2**45))
def test_a_size_as_an_option_is_never_less(count: int) -> None:
    shown = parse_bytes(size_option(count))
    assert count <= shown <= count + max(MIB, GIB // 10 + 1)


def test_more_ram_takes_what_is_on_the_disk(tmp_path: Path) -> None:
    model = read_footprint(_model(tmp_path, experts=64, blocks=40))
    fit = solve(model, Question(40 * MIB, 2 * MIB, 256))
    assert fit.on_disk_bytes > 0
    (words,) = [w for w in advice(fit) if w.startswith("More RAM")]
    (size,) = re.findall(r"--ram (\S+)", words)
    assert solve(model, dataclasses.replace(fit.question, ram_bytes=parse_bytes(size))).on_disk_bytes == 0


def test_fewer_slots_than_fit_are_taken_and_said(tmp_path: Path) -> None:
    model = read_footprint(_model(tmp_path))
    fit = solve(model, Question(0, GIB, slots=8))
    assert fit.slots == (8, 8)
    assert advice(fit)[0].startswith("More fits than was asked for: 40 slots")


def test_advice_is_what_the_changed_question_gives(tmp_path: Path) -> None:
    model = read_footprint(_model(tmp_path, experts=200, blocks=8))
    fit = _at(model, 0.1)
    now = fit.slots[0]
    for change, start in (({"cache_type": "q8_0"}, "--kv q8_0"), ({"context": 4096}, "--context 4096")):
        better = solve(model, dataclasses.replace(fit.question, **change))
        (words,) = [w for w in advice(fit) if w.startswith(start)]
        assert f"{better.slots[0]} slots in each layer instead of {now}" in words
        assert better.slots[0] > now


def test_without_the_gpu_is_advised_only_where_it_helps(tmp_path: Path) -> None:
    model = read_footprint(_model(tmp_path))
    small = solve(model, Question(1 * MIB, GIB))
    assert any("--vram 0" in words for words in advice(small))
    assert not any("--vram 0" in words for words in advice(solve(model, Question(1 * MIB, 1 * MIB))))


def test_more_memory_never_gives_fewer_slots(tmp_path: Path) -> None:
    model = read_footprint(_model(tmp_path))
    totals = [sum(solve(model, Question(0, ram)).slots) for ram in range(0, 200 * MIB, 500_000)]
    assert totals == sorted(totals)
    assert sum(0 < n < 80 for n in totals) > 0


# The command.


def test_the_table_names_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(capsys, _model(tmp_path), "--vram", "100M", "--ram", "200M")
    assert (status, err) == (0, "")
    for word in ("dense weights", "KV cache (f16)", "compute buffer", "margin", "expert slots", "experts in RAM", "on disk"):
        assert word in out
    assert "40 of 40 experts in each of 2 layers" in out


def test_without_ram_this_machines_is_taken_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer, err = _json(capsys, _model(tmp_path))
    assert answer["vram_bytes"] == 0
    assert answer["ram_bytes"] > 0
    assert "no --ram" in err


def test_a_context_beyond_the_training_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = _json(capsys, _model(tmp_path), "--ram", "1G", "--context", 8193)
    assert "8192 tokens" in err
    assert _json(capsys, _model(tmp_path), "--ram", "1G", "--context", 8192)[1] == ""


def test_a_model_without_heads_is_said_to_have_no_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _header(tmp_path / "m.gguf", "qwen3moe", {"block_count": 1, "expert_used_count": 2})
    answer, err = _json(capsys, path, "--ram", "1G")
    assert answer["kv_bytes"] == 0
    assert "0 bytes are counted" in err


@pytest.mark.parametrize("arguments", [("--context", "0"), ("--kv", "q9_0"), ("--vram", "much"), ("--slots", "-1")])
def test_senseless_options_are_usage_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, str]
) -> None:
    status, out, err = _run(capsys, _model(tmp_path), "--ram", "1G", *arguments, "--json")
    assert (status, out) == (2, "")
    assert "Traceback" not in err


def test_a_file_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(synth.moe().blob()[:100])
    status, out, err = _run(capsys, path, "--ram", "1G", "--json")
    assert (status, out) == (3, "")
    assert str(path) in err


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
