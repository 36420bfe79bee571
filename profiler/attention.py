"""What a model's layers keep of the tokens they have seen, as llama.cpp derives it from the metadata.

Source: `llama_model_base::load_hparams` and `create_memory` of src/llama-model.cpp, `load_arch_hparams` of the architectures
with experts in src/models/*.cpp, and src/llama-hparams.cpp (llama.cpp build 11549).
"""

from __future__ import annotations

from dataclasses import dataclass

from bel.formats.errors import BadInputError
from bel.formats.gguf_model import GgufModel

_RECURRENT_WITHOUT_HEADS = ("jamba", "granitehybrid", "lfm2moe", "plamo2", "kimi-linear", "kimi-k3", "bailingmoe3", "glm5-next")
"""Hybrids in which a layer is recurrent where it has no key heads."""
_RECURRENT_BY_INTERVAL = {"qwen3next": 4, "qwen35moe": 4, "qwen4exp": 4, "minimax-01": 8}
"""Hybrids in which every n-th layer has attention, with the n that holds where the file has no full_attention_interval."""
_HYBRIDS_THAT_KEEP_MTP = ("jamba", "granitehybrid", "lfm2moe", "plamo2", "kimi-linear", "kimi-k3", "bailingmoe3")
"""Hybrids whose cache has no filter for MTP blocks (`llama_memory_hybrid` takes every layer that is not recurrent)."""
_UNFILTERED = ("minimax-m3", "hy_v4", "deepseek4", *_HYBRIDS_THAT_KEEP_MTP)
_WITHOUT_CACHE = ("llada-moe", "rnd1", "nomic-bert-moe")
"""Diffusion and embedding models: they keep nothing from call to call."""
_WINDOW_BY_ARRAY = ("gemma4", "granite_swa", "maple", "mimo2", "step35", "dots3note")
"""Architectures that require an array of the layers with a sliding window."""
_WINDOW_BY_INTERVAL = {
    "afmoe": (4, False),
    "cohere2moe": (4, True),
    "exaone-moe": (4, False),
    "gpt-oss": (2, False),
    "laguna": (4, True),
    "llama4": (4, False),
    "mellum": (4, False),
    "smallthinker": (4, True),
}
"""Architectures in which every n-th layer sees everything: n where the file does not say, and whether that is the first."""
_FIXED_WINDOW = {"llama4": 8192, "smallthinker": 4096}
"""The window that the loader sets, whatever the file's number is."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of each block, MTP blocks included.  Lengths are elements of one head.

    `window` is 0 without sliding windows.  `keeps` tells which blocks have a cache of keys and values, `recurrent` which
    have a state of fixed size.  `is_mla`: a cell holds one compressed row and no values.
    """

    trunk: int
    heads: tuple[int, ...]
    heads_kv: tuple[int, ...]
    key_length: int
    value_length: int
    windowed_key_length: int
    windowed_value_length: int
    is_mla: bool
    window: int
    windowed: tuple[bool, ...]
    recurrent: tuple[bool, ...]
    keeps: tuple[bool, ...]

    @property
    def blocks(self) -> int:
        """All blocks, MTP blocks included."""
        return len(self.heads)

    def lengths(self, block: int) -> tuple[int, int]:
        """Elements of a key and of a value head of a block."""
        if self.windowed[block]:
            return self.windowed_key_length, self.windowed_value_length
        return self.key_length, self.value_length


class Keys:
    """The architecture's keys of a header, with the types that they must have."""

    def __init__(self, model: GgufModel) -> None:
        self.model, self.arch = model, model.arch or ""

    def number(self, suffix: str, default: int = 0) -> int:
        """A count.  Raises BadInputError where it is negative."""
        found = self.model.first.integer(f"{self.arch}.{suffix}")
        if found is not None and found < 0:
            raise BadInputError(f"{self.arch}.{suffix} is negative", path=str(self.model.first.path), found=found)
        return default if found is None else found

    def required(self, suffix: str) -> int:
        """A count above 0.  Raises BadInputError where there is none."""
        found = self.number(suffix)
        if not found:
            raise BadInputError(
                f"the header has no {self.arch or 'ARCH'}.{suffix}, without which the cache's size cannot be told",
                path=str(self.model.first.path),
            )
        return found

    def each(self, suffix: str, blocks: int, default: tuple[int, ...]) -> tuple[int, ...]:
        """One count per block: a scalar is repeated."""
        found = self.model.arch_integers(suffix, blocks)
        return default if found is None else tuple(found[:blocks])

    def flags(self, suffix: str, blocks: int) -> tuple[bool, ...] | None:
        """An array of one flag (bool or integer) per block, or None where there is none."""
        value = self.model.first.value(f"{self.arch}.{suffix}")
        if not isinstance(value, list):
            return None
        if len(value) < blocks:
            raise BadInputError(
                f"{self.arch}.{suffix} is an array that does not reach every layer",
                path=str(self.model.first.path),
                found=f"{len(value)} entries",
                expected=f"{blocks}",
            )
        return tuple(bool(v) for v in value[:blocks])


MAX_BLOCKS = 512  # LLAMA_MAX_LAYERS


def read_attention(model: GgufModel) -> Attention:
    """Read it from a model's metadata.  Raises BadInputError where a number that it needs is missing or senseless."""
    keys = Keys(model)
    blocks = keys.required("block_count")
    mtp = keys.number("nextn_predict_layers")
    if mtp > blocks or blocks > MAX_BLOCKS:
        raise BadInputError(
            f"{keys.arch}.block_count and nextn_predict_layers are no model's",
            path=str(model.first.path),
            found=f"{blocks} and {mtp}",
        )
    heads = keys.each("attention.head_count", blocks, (0,) * blocks)
    heads_kv = keys.each("attention.head_count_kv", blocks, heads)
    key, value = _head_length(keys, "key", heads), _head_length(keys, "value", heads)
    if keys.arch in ("kimi-k3", "glm5-next"):
        value = keys.number("attention.kv_lora_rank")
    trunk = blocks - mtp
    recurrent = _recurrent(keys, heads_kv, trunk)
    window, windowed = _windows(keys, blocks, trunk)
    return Attention(
        trunk,
        heads,
        heads_kv,
        key,
        value,
        keys.number("attention.key_length_swa", key),
        keys.number("attention.value_length_swa", value),
        bool(keys.number("attention.key_length_mla") and keys.number("attention.value_length_mla")),
        window,
        windowed,
        recurrent,
        _keeps(keys, recurrent, trunk),
    )


def _head_length(keys: Keys, what: str, heads: tuple[int, ...]) -> int:
    declared = keys.number(f"attention.{what}_length")
    count = next((n for n in heads if n), 0)
    return declared or (keys.required("embedding_length") // count if count else 0)


def _recurrent(keys: Keys, heads_kv: tuple[int, ...], trunk: int) -> tuple[bool, ...]:
    blocks = len(heads_kv)
    if keys.arch in ("nemotron_h", "nemotron_h_moe"):
        widths = keys.each("feed_forward_length", blocks, (0,) * blocks)
        return tuple(i < trunk and not heads_kv[i] and not widths[i] for i in range(blocks))
    if keys.arch in _RECURRENT_WITHOUT_HEADS:
        return tuple(i < trunk and not heads_kv[i] for i in range(blocks))
    if keys.arch in _RECURRENT_BY_INTERVAL:
        listed = keys.flags("attention.recurrent_layers", blocks)
        interval = keys.number("full_attention_interval", _RECURRENT_BY_INTERVAL[keys.arch]) or 1
        return listed or tuple(i < trunk and (i + 1) % interval != 0 for i in range(blocks))
    return (False,) * blocks


def _keeps(keys: Keys, recurrent: tuple[bool, ...], trunk: int) -> tuple[bool, ...]:
    blocks = len(recurrent)
    if keys.arch in _WITHOUT_CACHE:
        return (False,) * blocks
    reached = blocks if keys.arch in _UNFILTERED else trunk
    keeps = [i < reached and not recurrent[i] for i in range(blocks)]
    if keys.arch in ("nemotron_h", "nemotron_h_moe"):
        widths = keys.each("feed_forward_length", blocks, (0,) * blocks)
        keeps = [k and not width for k, width in zip(keeps, widths, strict=True)]
    if keys.arch == "gemma4":  # the last layers read the caches of earlier ones
        own = blocks - keys.number("attention.shared_kv_layers")
        keeps = [k and i < own for i, k in enumerate(keeps)]
    return tuple(keeps)


def _windows(keys: Keys, blocks: int, trunk: int) -> tuple[int, tuple[bool, ...]]:
    """The window in tokens (0: none) and the blocks that have it."""
    none = (False,) * blocks
    declared = keys.model.first.integer(f"{keys.arch}.attention.sliding_window")
    if keys.arch == "deepseek4":
        return keys.required("attention.sliding_window"), (True,) * blocks
    if keys.arch in _WINDOW_BY_ARRAY:
        flags = keys.flags("attention.sliding_window_pattern", blocks)
        return (keys.required("attention.sliding_window"), flags) if flags and any(flags) else (0, none)
    if keys.arch not in _WINDOW_BY_INTERVAL or declared == 0 or (declared is None and keys.arch != "llama4"):
        return 0, none
    interval, is_first_full = _WINDOW_BY_INTERVAL[keys.arch]
    window = _FIXED_WINDOW.get(keys.arch, keys.number("attention.sliding_window"))
    flags = keys.flags("attention.sliding_window_pattern", blocks)
    if flags is None:
        interval = keys.number("attention.sliding_window_pattern", interval)
        full = 0 if is_first_full else interval - 1
        flags = tuple(i < trunk and (interval == 0 or i % interval != full) for i in range(blocks))
    return (window, flags) if any(flags) else (0, none)
