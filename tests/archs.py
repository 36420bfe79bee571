"""Small random models of many MoE architectures, in the form of real files, which stock llama.cpp loads and decodes.

`make_model` writes one; `ARCHS` lists them.  The keys and tensors of an architecture are what its loader asks for
(llama.cpp src/models/*.cpp, build 11549) and its conversion script writes; tensor names are those of src/llama-arch.cpp.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

import arch_blocks as blocks
import llama_reader
from arch_parts import (
    N_VOCAB,
    SIGMOID,
    Keys,
    Shape,
    Weights,
    attention,
    common_keys,
    dense,
    expert_width,
    experts,
    gated,
    led,
    norm,
    plain_width,
    shared,
)
from bel.formats.ggml_types import GGML_TYPES, tensor_bytes
from synth import ARRAY, BOOL, F32, I32, STRING, U32, Gguf, Tensor, key

KEY_F32, TENSOR_I32 = 6, 26  # enum gguf_type, enum ggml_type
ROUTER_SPREAD = 2.0
"""Standard deviation of the router's logits for a normed input: wide enough that the chosen experts differ by token."""
MERGES = [
    ("Ġ", "t"),
    ("h", "e"),
    ("i", "n"),
    ("r", "e"),
    ("o", "n"),
    ("Ġ", "a"),
    ("Ġt", "he"),
    ("e", "r"),
    ("Ġ", "s"),
    ("a", "t"),
]


@dataclass(frozen=True, slots=True)
class Arch:
    """An architecture: its keys, the tensors of block i, and those outside the blocks (`ends`) beyond the usual ones."""

    keys: Callable[[Shape], Keys]
    block: Callable[[int, Shape], Weights]
    shape: Shape = field(default_factory=Shape)
    ends: Callable[[Shape], Weights] = lambda s: [("output_norm.weight", (s.n_embd,))]
    roles: tuple[str, ...] = ("gate", "up", "down")  # parts of an expert
    every: int = 1  # one block in so many has experts, the last of each group
    calls: int = 1  # how often a layer's experts are called for a token: GroveMoE calls two sets of them under the same names
    hash_layers: int = 0  # blocks that choose by the token's id: `ffn_moe_topk` exists, but is not the top of the logits

    def moe_layers(self, shape: Shape) -> list[int]:
        """The blocks with experts that decoding reaches."""
        return [i for i in range(shape.n_dense, shape.n_layer - shape.n_mtp) if (i + 1) % self.every == 0]

    def mtp_layers(self, shape: Shape) -> list[int]:
        """The blocks with experts behind the trunk, which decoding never reaches."""
        return list(range(shape.n_layer - shape.n_mtp, shape.n_layer))


def _softmax_moe(i: int, s: Shape, norms: str = "") -> Weights:
    return attention(i, s, norms=norms) + norm(i, s) + experts(i, s)


def _biased_moe(i: int, s: Shape, shexp: Weights, norms: str = "") -> Weights:
    return attention(i, s, norms=norms) + norm(i, s) + led(i, s, experts(i, s, bias=True) + shexp)


def _output_biases(s: Shape) -> Weights:
    return [("output_norm.weight", (s.n_embd,)), ("output_norm.bias", (s.n_embd,)), ("output.bias", (N_VOCAB,))]


def _shared_width(s: Shape) -> Keys:
    return {"expert_shared_feed_forward_length": s.n_ff}


MERGED = ("gate_up", "down")
ARCHS: dict[str, Arch] = {
    "qwen3moe": Arch(expert_width, lambda i, s: _softmax_moe(i, s, "head")),
    "qwen2moe": Arch(
        lambda s: expert_width(s) | _shared_width(s),
        lambda i, s: (
            attention(i, s, bias=True)
            + norm(i, s, "ffn_norm", "ffn_gate_inp_shexp")  # the shared expert's gate is one row
            + experts(i, s)
            + dense(i, s, "_shexp")
        ),
    ),
    "llama": Arch(plain_width, _softmax_moe),
    "olmoe": Arch(plain_width, lambda i, s: _softmax_moe(i, s, "full"), Shape(n_head_kv=4)),
    "deepseek2": Arch(blocks.deepseek2_keys, blocks.deepseek2, Shape(n_layer=4, n_dense=1)),
    "glm4moe": Arch(
        lambda s: gated(s) | {"nextn_predict_layers": s.n_mtp}, blocks.glm4moe, Shape(n_layer=4, n_dense=1, n_mtp=1)
    ),
    "gpt-oss": Arch(lambda s: expert_width(s) | {"attention.sliding_window": 128}, blocks.gpt_oss),
    "granitemoe": Arch(blocks.granitemoe_keys, _softmax_moe),
    "gemma4": Arch(
        blocks.gemma4_keys,
        blocks.gemma4,
        ends=lambda s: [("output_norm.weight", (s.n_embd,)), ("rope_freqs.weight", (s.head,))],
        roles=MERGED,
    ),
    "qwen3next": Arch(blocks.qwen3next_keys, blocks.qwen3next, Shape(n_layer=4), roles=MERGED),
    "qwen35moe": Arch(blocks.qwen3next_keys, blocks.qwen35moe, Shape(n_layer=4), roles=MERGED),
    "cohere2moe": Arch(blocks.cohere2moe_keys, blocks.cohere2moe, Shape(n_layer=4, n_dense=1, n_mtp=1), roles=MERGED),
    "ernie4_5-moe": Arch(
        lambda s: gated(s, None) | _shared_width(s) | {"interleave_moe_layer_step": 1},
        lambda i, s: _biased_moe(i, s, dense(i, s, "_shexp")),
        Shape(n_dense=1),
    ),
    "bailingmoe2": Arch(blocks.bailingmoe2_keys, blocks.bailingmoe2, Shape(n_dense=1)),
    "dots1": Arch(gated, lambda i, s: _biased_moe(i, s, shared(i, s), "head"), Shape(n_dense=1, n_head_kv=4)),
    "lfm2moe": Arch(
        blocks.lfm2moe_keys,
        blocks.lfm2moe,
        Shape(n_layer=4, n_dense=1),
        ends=lambda s: [("token_embd_norm.weight", (s.n_embd,))],  # the name that the output norm has in these files
    ),
    "smallthinker": Arch(lambda s: expert_width(s) | {"expert_gating_func": SIGMOID}, _softmax_moe),
    "grovemoe": Arch(blocks.grovemoe_keys, blocks.grovemoe, calls=2),
    "nemotron_h_moe": Arch(blocks.nemotron_h_moe_keys, blocks.nemotron_h_moe, Shape(n_layer=6), roles=("up", "down"), every=3),
    "llama4": Arch(
        lambda s: expert_width(s) | {"interleave_moe_layer_step": 2}, blocks.llama4, Shape(n_layer=4, n_used=1), every=2
    ),
    "phimoe": Arch(plain_width, blocks.phimoe, ends=_output_biases),
    "minimax-m2": Arch(
        lambda s: expert_width(s) | plain_width(s) | {"expert_gating_func": SIGMOID},
        lambda i, s: _biased_moe(i, s, [], "full"),
    ),
    "hunyuan-moe": Arch(
        lambda s: expert_width(s) | plain_width(s) | _shared_width(s),
        lambda i, s: _softmax_moe(i, s, "head") + dense(i, s, "_shexp"),
    ),
    "deepseek4": Arch(
        blocks.deepseek4_keys,
        blocks.deepseek4,
        ends=lambda s: [("output_norm.weight", (s.n_embd,)), *blocks.deepseek4_ends(s)],
        hash_layers=blocks.HASH_LAYERS,
    ),
}
"""The architectures, by their name in `general.architecture`."""


def make_model(arch: str, path: Path, *, seed: int = 0, quant: str = "f32", **shape: int) -> Path:
    """Write the model of an architecture in `ARCHS` and return its path.  The same arguments give the same bytes.

    `quant` is the type of the routed experts, by its ggml name ("q8_0", "mxfp4", ...; for the K-quants n_embd and n_ff_exp
    must be multiples of 256); every other tensor is F32.  `shape` replaces fields of the architecture's `Shape`; `n_dense`
    and `n_mtp` only where it has such blocks already.
    """
    kind = ARCHS[arch]
    s = dataclasses.replace(kind.shape, **shape)
    assert all(getattr(kind.shape, name) for name in ("n_dense", "n_mtp") if getattr(s, name)), f"{arch} has no such blocks"
    entries = [key("general.architecture", STRING, arch), key("general.name", STRING, f"random {arch}")]
    entries += [_entry(f"{arch}.{name}", value) for name, value in (common_keys(s) | kind.keys(s)).items() if value is not None]
    entries += [_entry(f"tokenizer.ggml.{name}", value) for name, value in _tokenizer_keys().items()]
    weights: Weights = [("token_embd.weight", (s.n_embd, N_VOCAB)), ("output.weight", (s.n_embd, N_VOCAB)), *kind.ends(s)]
    weights += [w for i in range(s.n_layer) for w in kind.block(i, s)]
    return Gguf(entries, [_tensor(name, ne, seed, type_id(quant), s) for name, ne in weights]).write(path)


def vocabulary() -> list[str]:
    """A token for each byte, as GPT-2 spells bytes, one for each merge, and an end token: any text can be tokenised."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable} | {byte: chr(256 + number) for number, byte in enumerate(rest)}
    return [spelled[byte] for byte in range(256)] + [a + b for a, b in MERGES] + ["<|endoftext|>"]


def type_id(name: str) -> int:
    """The id of a tensor type, by its ggml name in any case."""
    return next(known.type_id for known in GGML_TYPES.values() if known.name == name.upper())


def _tokenizer_keys() -> Keys:
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": vocabulary(),
        "token_type": (I32, [1] * (N_VOCAB - 1) + [3]),  # normal tokens, and a control token at the end
        "merges": [f"{a} {b}" for a, b in MERGES],
        "bos_token_id": N_VOCAB - 1,
        "eos_token_id": N_VOCAB - 1,
        "add_bos_token": False,
    }


def _entry(name: str, value: object) -> bytes:
    """A metadata entry: see `Keys`.  A list has the type of its items, a tuple names it."""
    kinds = {bool: BOOL, int: U32, float: KEY_F32, str: STRING}
    if isinstance(value, list):
        return key(name, ARRAY, (kinds[type(value[0])], value))
    return key(name, ARRAY if isinstance(value, tuple) else kinds[type(value)], value)


def _tensor(name: str, ne: tuple[int, ...], seed: int, expert_type: int, s: Shape) -> Tensor:
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith("tid2eid.weight"):
        chosen = [random.permutation(s.n_expert)[: ne[0]] for _ in range(ne[1])]
        return Tensor(name, ne, TENSOR_I32, np.array(chosen, dtype="<i4").tobytes())
    values = _values(name, ne, random).astype("<f4")
    if name == "output.weight":
        values[-ne[0] :] = 0  # without this the end token's logit could be the highest, and greedy decoding would stop
    if name.endswith("_exps.weight"):
        return Tensor(name, ne, expert_type, _quantised(values, expert_type, ne))
    return Tensor(name, ne, F32, values.tobytes())


def _values(name: str, ne: tuple[int, ...], random: np.random.Generator) -> npt.NDArray[np.float64]:
    """A flat array of random values that keep activations near 1 from block to block."""
    noise = random.standard_normal(int(np.prod(ne)))
    if name.endswith("ffn_gate_inp.scale"):  # Gemma 4 divides the router's input by sqrt(n_embd) first
        return (1 + 0.1 * noise) * math.sqrt(ne[0])
    if name.endswith(("norm.weight", "norm_1.weight", "norm_2.weight", ".scale", "rope_freqs.weight")):
        return 1 + 0.1 * noise
    if name.endswith("ssm_a"):  # a decay: a state space model with a positive one overflows
        return -np.abs(noise)
    if name.endswith((".bias", "_base.weight", "_scale.weight", "sinks.weight", "ssm_d")):
        return 0.1 * noise
    if name == "token_embd.weight":
        return noise
    return noise * (ROUTER_SPREAD if name.endswith("ffn_gate_inp.weight") else 1.0) / math.sqrt(ne[0])


def _quantised(values: npt.NDArray[np.float32], type_number: int, ne: tuple[int, ...]) -> bytes:
    """ggml's own quantisation of a tensor, without an importance matrix."""
    if type_number == F32:
        return values.tobytes()
    size = tensor_bytes(type_number, ne)
    assert size is not None
    quantize = llama_reader.library().ggml_quantize_chunk
    integer, pointer = ctypes.c_int64, ctypes.c_void_p
    quantize.restype, quantize.argtypes = ctypes.c_size_t, [ctypes.c_int, pointer, pointer, integer, integer, integer, pointer]
    out = ctypes.create_string_buffer(size)
    done = quantize(type_number, values.ctypes.data, out, 0, values.size // ne[0], ne[0], None)
    assert done == size, f"ggml wrote {done} bytes, the type table says {size}"
    return out.raw
