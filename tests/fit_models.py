"""Models to fit: real metadata of an architecture, and as few bytes of weights as may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from synth import ARRAY, BOOL, F32, I32, STRING, U32, Gguf, Tensor, expert_stacks, key

Keys = dict[str, Any]

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


def arch_entries(arch: str, keys: Keys) -> list[bytes]:
    """Metadata of an architecture: ints as u32, lists of bools or ints as arrays."""
    entries = [key("general.architecture", STRING, arch), key("general.name", STRING, arch)]
    for name, value in keys.items():
        kind = ARRAY if isinstance(value, list) else U32
        made = (BOOL if isinstance(value[0], bool) else I32, value) if isinstance(value, list) else value
        entries.append(key(f"{arch}.{name}", kind, made))
    return entries


def metadata_model(path: Path, arch: str, keys: Keys) -> Path:
    """A model of an architecture with real metadata, and tensors that are only there to be a model."""
    tensors = [Tensor("token_embd.weight", (32, 8), F32), *expert_stacks(0, 4)]
    return Gguf(arch_entries(arch, {"embedding_length": 32} | keys), tensors).write(path)


def slot_model(tmp_path: Path, *, experts: int = 40, used: int = 4, blocks: int = 2) -> Path:
    """A model with slots of 8 KiB (three parts of 2176 bytes)."""
    keys = QWEN3_30B | {"block_count": blocks, "expert_used_count": used, "embedding_length": 32, "context_length": 8192}
    tensors = [Tensor("token_embd.weight", (32, 8), F32)]
    tensors += [t for block in range(blocks) for t in expert_stacks(block, experts)]
    return Gguf(arch_entries("qwen3moe", keys), tensors).write(tmp_path / "m.gguf")
