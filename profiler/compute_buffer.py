"""An estimate of llama.cpp's compute buffer: what one graph of a full ubatch holds at its widest place.

The rule is ours; it was held against the `compute buffer size` lines of llama.cpp build 11549, where it came out 3 to 12 %
above for two trained models at contexts of 512 to 32768, and 25 % below to 65 % above for small random ones of 24
architectures (the tests repeat both).  A graph is laid out once, so a tensor
takes its place until its last use: the attention mask (f16, tokens * cells) lies under everything; above it are some rows of
the model's width, and either the logits (f32, tokens * vocabulary) or the widest layer, whichever is larger.  The logits may
use the mask's place, which is free by then.
"""

from __future__ import annotations

from bel.formats.gguf_model import GgufModel
from bel.formats.units import align_up
from bel.profiler.attention import Attention, Keys, read_attention
from bel.profiler.kv_cache import F32_BYTES, PAD_CELLS, ubatch_tokens, window_cells

MASK_BYTES = 2  # f16, as flash attention wants it
RESIDUAL_ROWS = 8  # rows of the model's width that live at once: residual, norms, attention's output


def compute_bytes(model: GgufModel, context: int) -> int:
    """Bytes of the compute buffer for a context of `context` tokens.  An estimate: see the module."""
    attention, keys = read_attention(model), Keys(model)
    tokens, width = ubatch_tokens(context), keys.required("embedding_length")
    streams = keys.number("hyper_connection.count")  # parallel residuals
    row = F32_BYTES * tokens
    mask = MASK_BYTES * tokens * _mask_cells(attention, context)
    logits, layer = row * _vocabulary(model), row * max(_widths(attention, keys, width))
    return mask + row * (RESIDUAL_ROWS + 2 * streams) * width + (layer if mask >= logits else max(layer, logits))


def _mask_cells(attention: Attention, context: int) -> int:
    """Cells of all masks: sliding windows have one of their own."""
    cells = align_up(context, PAD_CELLS)
    return cells + (window_cells(attention.window, context) if attention.window else 0)


def _widths(attention: Attention, keys: Keys, width: int) -> list[int]:
    """Elements a token of what lives at once in a layer, by the parts that are wide."""
    blocks = attention.blocks
    used = max(keys.each("expert_used_count", blocks, (0,)))
    expert = max(keys.each("expert_feed_forward_length", blocks, (0,)))
    dense = max(keys.each("feed_forward_length", blocks, (0,)))
    key, value = attention.lengths(0)
    return [
        2 * used * width,  # the experts' outputs, plain and weighted
        3 * used * (expert or dense),  # gate, up and their product
        3 * dense,
        max(attention.heads) * (max(key, attention.key_length) + max(value, attention.value_length)),  # queries and outputs
        5 * keys.number("ssm.inner_size"),  # the projection's parts and the convolution's output
    ]


def _vocabulary(model: GgufModel) -> int:
    """Tokens of the vocabulary, by the tensor that the logits come from."""
    for name in ("output.weight", "token_embd.weight"):
        for tensor in model.tensors:
            if tensor.name == name and len(tensor.ne) > 1:
                return tensor.ne[1]
    return 0
