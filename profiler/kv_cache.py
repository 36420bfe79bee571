"""Bytes of the caches that a context holds: keys and values, indexer keys, and the states of recurrent layers.

Source: src/llama-kv-cache*.cpp, src/llama-memory-*.cpp and `llama_hparams::n_embd_r/n_embd_s` of llama.cpp build 11549, for
one sequence, flash attention and `swa_full` off, as llama.cpp's defaults have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bel.formats.errors import UsageError
from bel.formats.ggml_types import GGML_TYPES, tensor_bytes
from bel.formats.gguf_model import GgufModel
from bel.formats.units import align_up
from bel.profiler.attention import Attention, Keys, read_attention

UBATCH_TOKENS = 512  # llama.cpp's default: the most tokens of one graph
PAD_CELLS = 256  # llama.cpp rounds contexts and windows up to this
F32_BYTES = 4
_TYPE_IDS = {known.name.lower(): known.type_id for known in GGML_TYPES.values()}
CACHE_TYPES = ("f16", "f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""Types of a cache, by their names on llama.cpp's command line (common/arg.cpp, `kv_cache_types`)."""
_CSA_RATIO, _HCA_RATIO = 4, 128  # tokens of a compressed cell of DeepSeek V4


@dataclass(frozen=True, slots=True)
class Cache:
    """One cache: `cells` rows of every width in `widths`, each a tensor of its own; widths are elements of the cache's type."""

    name: str
    cells: int
    widths: tuple[int, ...]

    def size_bytes(self, cache_type: str) -> int:
        """Bytes of all its tensors.  Raises UsageError where a row is not whole blocks of the type."""
        return sum(self.cells * row_bytes(width, cache_type) for width in self.widths)


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """`kv_bytes` grow with the context.  `state_bytes` do not.

    `padding_bytes` is what llama.cpp adds to `kv_bytes` by rounding the context up to a multiple of 256.
    """

    kv_bytes: int
    state_bytes: int
    padding_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.kv_bytes + self.state_bytes + self.padding_bytes


def cache_bytes(model: GgufModel, context: int, cache_type: str) -> CacheBytes:
    """Bytes of a model's caches for `context` tokens (at least 1) of one sequence; `cache_type` is one of CACHE_TYPES.

    Raises UsageError where llama.cpp refuses the type for this model, BadInputError where the metadata do not tell.
    """
    attention, keys = read_attention(model), Keys(model)
    _check_type(attention, cache_type)
    kv = sum(cache.size_bytes(cache_type) for cache in caches(attention, keys, context))
    padded = sum(cache.size_bytes(cache_type) for cache in caches(attention, keys, align_up(context, PAD_CELLS)))
    return CacheBytes(kv, _state_bytes(attention, keys), padded - kv)


def row_bytes(elements: int, cache_type: str) -> int:
    """Bytes of a row.  Raises UsageError where it is not whole blocks."""
    try:
        size = tensor_bytes(_TYPE_IDS[cache_type], (elements,))
    except ValueError as error:
        raise UsageError(f"--kv {cache_type} does not suit this model: {error}", hint="Use --kv f16") from None
    assert size is not None, "every cache type is in the type table"
    return size


def ubatch_tokens(context: int) -> int:
    """Most tokens of one graph in a context of this size."""
    return min(UBATCH_TOKENS, align_up(context, PAD_CELLS))


def window_cells(window: int, context: int) -> int:
    """Cells of a cache with a sliding window: room for the window and one ubatch, rounded up, at most the context."""
    return align_up(min(context, window + ubatch_tokens(context)), PAD_CELLS)


def caches(attention: Attention, keys: Keys, context: int) -> list[Cache]:
    """The caches of a context of `context` tokens."""
    if keys.arch == "deepseek4":
        return _compressed_caches(attention, keys, context)
    full = [i for i in range(attention.blocks) if attention.keeps[i] and not attention.windowed[i]]
    near = [i for i in range(attention.blocks) if attention.keeps[i] and attention.windowed[i]]
    found = [Cache("full", context, _widths(attention, full))]
    if near:
        found.append(Cache("window", window_cells(attention.window, context), _widths(attention, near)))
    width = _indexer_width(keys)
    if width:
        owners = _indexer_owners(attention, keys)
        values = () if attention.is_mla or keys.arch == "qwen4exp" else (attention.value_length,)
        found.append(Cache("indexer", context, (width, *values) * len(owners)))
    return found


def _widths(attention: Attention, blocks: Sequence[int]) -> tuple[int, ...]:
    widths: list[int] = []
    for block in blocks:
        key, value = attention.lengths(block)
        heads = attention.heads_kv[block]
        widths += [key * heads] if attention.is_mla else [key * heads, value * heads]
    return tuple(widths)


def _indexer_width(keys: Keys) -> int:
    """Elements of a cell of the sparse attention's indexer; 0 where there is none."""
    width = keys.number("attention.indexer.key_length")
    if keys.arch == "hy_v4":
        return width if keys.number("attention.indexer.top_k") else 0
    if keys.arch == "glm5-next":
        return 3 * width  # key, gate and pooled key
    if keys.arch == "qwen4exp":
        return width * (2 if any(keys.each("attention.compress_ratios", 1, (0,))) else 1)  # key and pooled key
    return width if keys.arch in ("deepseek32", "glm-dsa", "dots3note", "minimax-m3") else 0


def _indexer_owners(attention: Attention, keys: Keys) -> list[int]:
    """The blocks with an indexer of their own; the others use that of an earlier one."""
    if keys.arch == "minimax-m3":
        return list(range(keys.number("leading_dense_block_count"), attention.blocks))
    trunk = [i for i in range(attention.trunk) if not attention.recurrent[i]]
    if keys.arch in ("deepseek32", "qwen4exp"):
        return trunk
    flags = keys.flags("attention.indexer.types", attention.trunk)
    if flags is None:
        is_sparse = keys.arch == "glm-dsa" and keys.number("context_length") >= 2**20  # GLM 5.2, whose first files had no key
        flags = tuple(not is_sparse or i < 2 or i % 4 == 2 for i in range(attention.trunk))
    return [i for i in trunk if flags[i]]


def _compressed_caches(attention: Attention, keys: Keys, context: int) -> list[Cache]:
    """DeepSeek V4: a window of raw rows in each layer, and compressed rows of all tokens by the layer's ratio."""
    ratios = keys.each("attention.compress_ratios", attention.blocks, (0,) * attention.blocks)
    found = [
        Cache("window", window_cells(attention.window, context), (attention.windowed_key_length,) * attention.blocks),
    ]
    for name, ratio, width in (
        ("compressed", _CSA_RATIO, attention.windowed_key_length),
        ("compressed more", _HCA_RATIO, attention.windowed_key_length),
        ("indexer", _CSA_RATIO, keys.number("attention.indexer.key_length")),
    ):
        cells = align_up(max(1, -(-context // ratio)), PAD_CELLS)
        found.append(Cache(name, cells, (width,) * ratios.count(ratio)))
    return found


def _state_bytes(attention: Attention, keys: Keys) -> int:
    if keys.arch == "deepseek4":
        return _compressor_bytes(attention, keys)
    return F32_BYTES * sum(attention.recurrent) * _state_elements(attention, keys)


def _state_elements(attention: Attention, keys: Keys) -> int:
    """Elements of the state of one recurrent layer: the convolution's last inputs and the recurrence's state."""
    convolution, heads = keys.number("ssm.conv_kernel"), attention.heads[0]
    if keys.arch == "lfm2moe":
        return keys.required("embedding_length") * (keys.required("shortconv.l_cache") - 1)
    head = keys.number("kda.head_dim")
    if head:
        return 3 * (convolution - 1 if convolution else 3) * heads * head + head * head * heads
    inner, state = keys.number("ssm.inner_size"), keys.number("ssm.state_size")
    channels = max(convolution - 1, 0) * (inner + 2 * keys.number("ssm.group_count") * state)
    if keys.arch == "minimax-01":
        return channels + attention.key_length**2 * heads
    return channels + state * inner


def _compressor_bytes(attention: Attention, keys: Keys) -> int:
    """DeepSeek V4's compressors: two tensors each, of the tokens that are not yet compressed."""
    ratios = keys.each("attention.compress_ratios", attention.blocks, (0,) * attention.blocks)
    ratios = ratios[: attention.blocks]
    wide = 2 * (attention.windowed_key_length + keys.number("attention.indexer.key_length"))
    csa = ratios.count(_CSA_RATIO) * 2 * _CSA_RATIO * wide
    hca = ratios.count(_HCA_RATIO) * _HCA_RATIO * attention.windowed_key_length
    return 2 * F32_BYTES * (csa + hca)


def _check_type(attention: Attention, cache_type: str) -> None:
    """Raise UsageError where llama.cpp does not take the type: a head must be whole blocks (`llama_init_from_model`)."""
    block = GGML_TYPES[_TYPE_IDS[cache_type]].block_elements
    for i in range(attention.trunk):
        for length in attention.lengths(i):
            if attention.keeps[i] and attention.heads_kv[i] and length % block:
                raise UsageError(
                    f"--kv {cache_type} does not suit this model: an attention head of layer {i} has {length} elements, which "
                    f"are not whole blocks of {block}, and llama.cpp refuses it",
                    hint="Use --kv f16",
                )
