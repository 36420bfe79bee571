"""Bytes of caches and states, worked out by hand from the rules that the comment beside each names."""

from __future__ import annotations

from pathlib import Path

import pytest

from bel.formats.errors import UsageError
from bel.formats.gguf_model import open_model
from bel.profiler.kv_cache import cache_bytes
from fit_models import MLA, QWEN3_30B, QWEN3NEXT, Keys, metadata_model
from refused import refusal

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
    model = open_model(metadata_model(tmp_path / "m.gguf", arch, keys))
    found = cache_bytes(model, context, cache_type)
    assert (found.kv_bytes, found.state_bytes) == (kv_bytes, state_bytes)


def test_rounding_of_the_context_is_a_line_of_its_own(tmp_path: Path) -> None:
    model = open_model(metadata_model(tmp_path / "m.gguf", "qwen3moe", QWEN3_30B))
    assert cache_bytes(model, 1000, "f16").padding_bytes == 24 * 48 * 4 * 256 * 2
    assert cache_bytes(model, 1024, "f16").padding_bytes == 0


def test_a_type_that_llama_cpp_refuses_is_refused(tmp_path: Path) -> None:
    model = open_model(metadata_model(tmp_path / "m.gguf", "qwen3moe", QWEN3_30B | {"attention.key_length": 80}))
    error = refusal(lambda: cache_bytes(model, 512, "q8_0"), UsageError)
    assert "80" in str(error)
    assert cache_bytes(model, 512, "f16").kv_bytes == 512 * 48 * 4 * (80 + 128) * 2


@pytest.mark.parametrize("keys", [{}, {"block_count": 600}, {"block_count": 2, "nextn_predict_layers": 3}])
def test_metadata_that_do_not_tell_are_refused(tmp_path: Path, keys: Keys) -> None:
    path = metadata_model(tmp_path / "m.gguf", "qwen3moe", keys)
    error = refusal(lambda: cache_bytes(open_model(path), 512, "f16"))
    assert "block_count" in str(error)


def test_an_array_that_is_too_short_is_refused(tmp_path: Path) -> None:
    keys = GEMMA4 | {"attention.sliding_window_pattern": [True]}
    error = refusal(lambda: cache_bytes(open_model(metadata_model(tmp_path / "m.gguf", "gemma4", keys)), 512, "f16"))
    assert "sliding_window_pattern" in str(error)
