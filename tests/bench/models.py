"""The models that are measured: random weights of a real shape, and a header with a very large vocabulary.

What is written is a function of the arguments alone.  Tensors are made and written one at a time, so that making a model
takes little memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

Q4_0 = gguf.GGMLQuantizationType.Q4_0
F32 = gguf.GGMLQuantizationType.F32
BLOCK_ELEMENTS, BLOCK_BYTES = gguf.GGML_QUANT_SIZES[Q4_0]


@dataclass(frozen=True, slots=True)
class BigModel:
    """A `qwen3moe` in Q4_0 with the widths of Qwen3-30B-A3B; 12 layers make 4.2 GB.  Stock llama.cpp loads it."""

    layers: int = 12
    width: int = 2048
    expert_ff: int = 768
    experts: int = 128
    used: int = 8
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 128
    vocab: int = 512
    seed: int = 0


Spec = tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, float]
"""Name, shape in numpy order, type, and the scale of an F32 tensor's noise (0: all ones)."""


def _specs(m: BigModel) -> Iterator[Spec]:
    yield "token_embd.weight", (m.vocab, m.width), F32, 1.0
    yield "output_norm.weight", (m.width,), F32, 0.0
    yield "output.weight", (m.vocab, m.width), F32, 0.02
    q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    for layer in range(m.layers):
        p = f"blk.{layer}."
        yield p + "attn_norm.weight", (m.width,), F32, 0.0
        yield p + "attn_q.weight", (q, m.width), Q4_0, 0.0
        yield p + "attn_k.weight", (kv, m.width), Q4_0, 0.0
        yield p + "attn_v.weight", (kv, m.width), Q4_0, 0.0
        yield p + "attn_q_norm.weight", (m.head_dim,), F32, 0.0
        yield p + "attn_k_norm.weight", (m.head_dim,), F32, 0.0
        yield p + "attn_output.weight", (m.width, q), Q4_0, 0.0
        yield p + "ffn_norm.weight", (m.width,), F32, 0.0
        yield p + "ffn_gate_inp.weight", (m.experts, m.width), F32, 0.05
        yield p + "ffn_gate_exps.weight", (m.experts, m.expert_ff, m.width), Q4_0, 0.0
        yield p + "ffn_up_exps.weight", (m.experts, m.expert_ff, m.width), Q4_0, 0.0
        yield p + "ffn_down_exps.weight", (m.experts, m.width, m.expert_ff), Q4_0, 0.0


def _stored_shape(spec: Spec) -> tuple[int, ...]:
    """The shape of a tensor as bytes (Q4_0) or elements (F32)."""
    _, shape, kind, _ = spec
    return shape if kind is F32 else (*shape[:-1], shape[-1] // BLOCK_ELEMENTS * BLOCK_BYTES)


def _data(rng: np.random.Generator, spec: Spec) -> np.ndarray:
    """One tensor's data.  Q4_0: random nibbles under small scales, so that a forward pass stays finite."""
    _, shape, kind, scale = spec
    if kind is F32:
        ones = np.ones(shape, np.float32)
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale) if scale else ones
    blocks = np.frombuffer(rng.bytes(int(np.prod(_stored_shape(spec)))), np.uint8).reshape(-1, BLOCK_BYTES).copy()
    scales = rng.uniform(0.004, 0.008, len(blocks)).astype(np.float16)
    blocks[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(_stored_shape(spec))


def big_path(folder: Path, model: BigModel) -> Path:
    """Where the benchmarks keep a model, which they share."""
    return folder / f"random-{model.layers}-layers.gguf"


def make_big(path: Path, model: BigModel) -> bool:
    """Write `model` to `path`, unless it is there already, whole and of these settings.  Whether it was written."""
    partial = path.with_name(path.name + ".part")
    specs = list(_specs(model))
    writer = gguf.GGUFWriter(partial, "qwen3moe")
    _describe(writer, model)
    for spec in specs:
        shape, kind = _stored_shape(spec), spec[2]
        dtype = np.dtype(np.float32 if kind is F32 else np.uint8)
        size = int(np.prod(shape)) * dtype.itemsize
        writer.add_tensor_info(spec[0], shape, dtype, size, None if kind is F32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if _is_there(path, partial, specs):
        writer.close()
        partial.unlink()
        return False
    rng = np.random.default_rng(model.seed)
    for spec in specs:
        writer.write_tensor_data(_data(rng, spec))
    writer.close()
    os.replace(partial, path)
    return True


def _is_there(path: Path, header: Path, specs: list[Spec]) -> bool:
    """Whether `path` begins with this very header and has the size that follows from it."""
    if not path.exists():
        return False
    head = header.read_bytes()
    sizes = [int(np.prod(_stored_shape(s))) * (4 if s[2] is F32 else 1) for s in specs]
    expected = sum(gguf.GGUFWriter.ggml_pad(size, gguf.GGUF_DEFAULT_ALIGNMENT) for size in [len(head), *sizes])
    with path.open("rb") as file:
        return path.stat().st_size == expected and file.read(len(head)) == head


def _describe(writer: gguf.GGUFWriter, m: BigModel) -> None:
    writer.add_name(f"random {m.layers}x{m.experts} seed {m.seed}")
    writer.add_block_count(m.layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(m.width)
    writer.add_feed_forward_length(m.expert_ff * m.used)
    writer.add_expert_feed_forward_length(m.expert_ff)
    writer.add_expert_count(m.experts)
    writer.add_expert_used_count(m.used)
    writer.add_head_count(m.heads)
    writer.add_head_count_kv(m.kv_heads)
    writer.add_key_length(m.head_dim)
    writer.add_value_length(m.head_dim)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    alphabet = byte_alphabet()
    writer.add_token_list([*alphabet, *(f"<unused {i}>" for i in range(m.vocab - len(alphabet)))])
    writer.add_token_types([gguf.TokenType.NORMAL] * m.vocab)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(m.vocab - 2)
    writer.add_eos_token_id(m.vocab - 1)


def byte_alphabet() -> list[str]:
    """GPT-2's printable characters for the 256 bytes: a byte that prints stands for itself, others for 256 and up."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


def make_header(path: Path, tokens: int = 200_000) -> None:
    """A tiny model under a large header: tokens, token types and merges, `tokens` elements each."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(1)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {i}" for i in range(tokens)])
    writer.add_token_types([gguf.TokenType.NORMAL] * tokens)
    writer.add_token_merges([f"left{i} right{i}" for i in range(tokens)])
    rng = np.random.default_rng(0)
    writer.add_tensor("blk.0.ffn_gate_inp.weight", rng.standard_normal((4, 32), dtype=np.float32))
    for role in ("gate", "up", "down"):
        stack = rng.integers(0, 256, (4, 32, BLOCK_BYTES), dtype=np.uint8)
        writer.add_tensor(f"blk.0.ffn_{role}_exps.weight", stack, raw_dtype=Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
