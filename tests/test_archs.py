"""Models of many architectures: stock llama.cpp loads, decodes and routes them, and a bundle holds each exactly."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import archs
import llama_reader
from bel.formats.console import run_command
from bel.repack.cli import NAME, main_group

TEXT = "The café, 42 £\n\t."
TOKENS = [72, 101, 32, 256, 10, 200, 120, 66, 257, 41, 104, 7]
PROMPT, UBATCH = 8, 5
"""The first tokens are one prompt, cut into ubatches of 5 and 3; each of the others is decoded alone."""
_TOPK = re.compile(rb"ffn_moe_topk-(\d+)")


class _Tensor(ctypes.Structure):
    """The beginning of ggml_tensor (ggml/include/ggml.h)."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    )


_EvalCallback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.POINTER(_Tensor), ctypes.c_bool, ctypes.c_void_p)


class _ContextParams(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        *((name, ctypes.c_uint32) for name in ("n_outputs_max", "n_outputs_max_per_seq")),
        *((name, ctypes.c_int32) for name in ("n_threads", "n_threads_batch")),
        *((name, ctypes.c_int) for name in ("ctx_type", "rope_scaling", "pooling", "attention", "flash_attn")),
        *((name, ctypes.c_float) for name in ("rope_base", "rope_scale", "yarn_ext", "yarn_attn", "yarn_fast", "yarn_slow")),
        ("yarn_orig_ctx", ctypes.c_uint32),
        ("defrag_thold", ctypes.c_float),
        ("cb_eval", _EvalCallback),
        ("cb_eval_user_data", ctypes.c_void_p),
        ("type_k", ctypes.c_int),
        ("type_v", ctypes.c_int),
        ("moe_cache_size", ctypes.c_size_t),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        *((name, ctypes.c_bool) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full", "kv_unified")),
        ("samplers", ctypes.c_void_p),
        ("n_samplers", ctypes.c_size_t),
        ("ctx_other", ctypes.c_void_p),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


def decode(path: Path) -> dict[str, Any]:
    """Run TOKENS through a model: are all logits finite, how many rows of them differ, what each layer chose, row by row."""
    lib = _library()
    lib.llama_backend_init()
    model_params = lib.llama_model_default_params()
    model_params.n_gpu_layers, model_params.load_mode = 0, llama_reader.LOAD_MODE_MMAP
    model = lib.llama_model_load_from_file(bytes(path), model_params)
    assert model, f"llama.cpp does not load {path}"
    chosen: dict[int, list[list[int]]] = {}
    callback = _EvalCallback(lambda tensor, ask, _: _observe(tensor, ask, chosen))
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = 64, 64, UBATCH, 1, 1
    params.cb_eval = callback
    context = lib.llama_init_from_model(model, params)
    assert context, f"no context for {path}"
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    rows: list[list[float]] = []
    batch = lib.llama_batch_init(PROMPT, 0, 1)
    for start, count in [(0, PROMPT), *((at, 1) for at in range(PROMPT, len(TOKENS)))]:
        for i in range(count):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = TOKENS[start + i], start + i, 1, 1
            batch.seq_id[i][0] = 0
        batch.n_tokens = count
        assert lib.llama_decode(context, batch) == 0
        rows += [lib.llama_get_logits_ith(context, i)[:n_vocab] for i in range(count)]
    text = _tokenised(model, TEXT)
    finite = all(math.isfinite(x) for row in rows for x in row)
    return {
        "finite": finite,
        "distinct": len({tuple(r) for r in rows}),
        "chosen": chosen,
        "text_tokens": text,
        "n_vocab": n_vocab,
    }


def _tokenised(model: int, text: str) -> list[int]:
    lib, data = _library(), text.encode()
    out = (ctypes.c_int32 * 64)()
    count = lib.llama_tokenize(lib.llama_model_get_vocab(model), data, len(data), out, 64, False, False)
    return list(out[:count])


def _observe(tensor: Any, ask: bool, chosen: dict[int, list[list[int]]]) -> bool:
    lib = _library()
    match = _TOPK.fullmatch(lib.ggml_get_name(tensor))
    if match and not ask:
        (used, rows), stride = tensor.contents.ne[:2], tensor.contents.nb[1]
        data = (ctypes.c_byte * ((rows - 1) * stride + used * 4))()
        lib.ggml_backend_tensor_get(tensor, data, 0, len(data))
        chosen.setdefault(int(match[1]), []).extend(
            list((ctypes.c_int32 * used).from_buffer(data, row * stride)) for row in range(rows)
        )
    return bool(match) or not ask


@functools.cache
def _library() -> ctypes.CDLL:
    lib = llama_reader.library()
    pointer, integer, tensor = ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(_Tensor)
    for name, result, arguments in (
        ("llama_context_default_params", _ContextParams, []),
        ("llama_init_from_model", pointer, [pointer, _ContextParams]),
        ("llama_model_get_vocab", pointer, [pointer]),
        ("llama_vocab_n_tokens", integer, [pointer]),
        ("llama_batch_init", _Batch, [integer, integer, integer]),
        ("llama_decode", integer, [pointer, _Batch]),
        ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), [pointer, integer]),
        ("llama_tokenize", integer, [pointer, ctypes.c_char_p, integer, pointer, integer, ctypes.c_bool, ctypes.c_bool]),
        ("ggml_get_name", ctypes.c_char_p, [tensor]),
        ("ggml_backend_tensor_get", None, [tensor, pointer, ctypes.c_size_t, ctypes.c_size_t]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


@pytest.mark.parametrize("arch", archs.ARCHS)
def test_llama_cpp_decodes_and_routes(arch: str, tmp_path: Path) -> None:
    """Every row is complete in every MoE layer that decoding reaches, and tokens choose different experts."""
    kind = archs.ARCHS[arch]
    answer = _decoded(archs.make_model(arch, tmp_path / "model.gguf"))
    assert answer["finite"]
    assert answer["distinct"] == len(TOKENS), "tokens have logits of their own"
    assert [int(layer) for layer in answer["chosen"]] == kind.moe_layers(kind.shape)
    for rows in answer["chosen"].values():
        assert len(rows) == len(TOKENS) * kind.calls
        assert all(len(set(row)) == kind.shape.n_used and set(row) <= set(range(kind.shape.n_expert)) for row in rows)
        assert len({tuple(row) for row in rows}) > 2, "routing depends on the token"


def test_any_text_can_be_tokenised(tmp_path: Path) -> None:
    """The byte vocabulary gives every text back."""
    answer = _decoded(archs.make_model("qwen3moe", tmp_path / "model.gguf"))
    ids, vocabulary = answer["text_tokens"], archs.vocabulary()
    assert answer["n_vocab"] == len(vocabulary)
    byte_of = {spelled: byte for byte, spelled in enumerate(vocabulary[:256])}
    assert bytes(byte_of[char] for i in ids for char in vocabulary[i]) == TEXT.encode()
    assert max(ids) > 255, "a merge was made"


@pytest.mark.parametrize(
    ("arch", "quant", "shape"),
    [
        ("gpt-oss", "mxfp4", {}),
        ("glm4moe", "q8_0", {"n_expert": 16, "n_used": 4}),
        ("gemma4", "q4_k", {"n_embd": 256, "n_ff_exp": 256, "n_layer": 2, "n_expert": 4}),
    ],
)
def test_quantised_experts_decode(arch: str, quant: str, shape: dict[str, int], tmp_path: Path) -> None:
    """`quant` and `shape` reach the file, and llama.cpp computes with it."""
    path = archs.make_model(arch, tmp_path / "model.gguf", quant=quant, **shape)
    types = {t.type_id for t in llama_reader.parse(path).tensors if t.name.endswith("_exps.weight")}
    assert types == {archs.type_id(quant)}
    answer = _decoded(path)
    assert answer["finite"]
    expected = dataclasses.replace(archs.ARCHS[arch].shape, **shape)
    assert [int(layer) for layer in answer["chosen"]] == archs.ARCHS[arch].moe_layers(expected)
    assert {len(row) for rows in answer["chosen"].values() for row in rows} == {expected.n_used}


@pytest.mark.parametrize("arch", archs.ARCHS)
def test_a_bundle_holds_it_exactly(arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bundle has the layers that the model was made with, verifies, and gives the file back."""
    kind = archs.ARCHS[arch]
    shape, path = kind.shape, archs.make_model(arch, tmp_path / "model.gguf")
    assert path.stat().st_size < 5_000_000
    assert run_command(main_group, NAME, [str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    layers = kind.moe_layers(shape) + kind.mtp_layers(shape)
    assert answer["moe_layers"] == layers
    assert answer["mtp_layers"] == kind.mtp_layers(shape)
    assert answer["n_experts_by_layer"] == {str(layer): shape.n_expert for layer in layers}
    assert answer["n_expert_used_by_layer"] == {str(layer): shape.n_used for layer in layers}
    parts = {name.split(".")[2] for name in answer["routed_expert_tensors"]}
    assert parts == {f"ffn_{role}_exps" for role in kind.roles}
    assert len(answer["routed_expert_tensors"]) == len(layers) * len(kind.roles)
    bundle = str(path.with_name("model.bel"))
    assert run_command(main_group, NAME, ["verify", bundle, "--source", str(path)]) == 0
    assert run_command(main_group, NAME, ["restore", bundle, "-o", str(tmp_path / "back")]) == 0
    assert (tmp_path / "back" / "model.gguf").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("arch", archs.ARCHS)
def test_the_same_arguments_give_the_same_bytes(arch: str, tmp_path: Path) -> None:
    """A model is a function of its arguments; another seed is another model of the same size."""
    first, again, other = (
        archs.make_model(arch, tmp_path / f"{n}.gguf", seed=seed).read_bytes() for n, seed in enumerate((3, 3, 4))
    )
    assert first == again
    assert len(first) == len(other)
    assert first != other


def _decoded(path: Path) -> dict[str, Any]:
    """`decode` in a process of its own, so that a crash of the library is one failed test with its last words."""
    done = subprocess.run([sys.executable, __file__, str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-2000:]}"
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


if __name__ == "__main__":
    print(json.dumps(decode(Path(sys.argv[1]))))
