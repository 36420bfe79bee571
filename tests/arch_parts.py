"""What the blocks of most architectures are made of: keys, and tensors as name and dimensions (ggml order, fastest first)."""

from __future__ import annotations

from dataclasses import dataclass

Weights = list[tuple[str, tuple[int, ...]]]
Keys = dict[str, object]
"""Metadata without the architecture's prefix: an int is written as u32, a float as f32; None is left out."""
SIGMOID, SQRT_SOFTPLUS = 2, 4  # enum llama_expert_gating_func_type
N_VOCAB = 267  # 256 bytes, ten merges, an end token


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model.  `n_layer` counts the MTP blocks at its end too."""

    n_layer: int = 3
    n_mtp: int = 0
    n_dense: int = 0  # leading blocks without experts, where the architecture knows them
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 96
    n_ff_exp: int = 32
    n_expert: int = 8
    n_used: int = 2
    n_ctx: int = 512

    @property
    def head(self) -> int:
        """Width of an attention head."""
        return self.n_embd // self.n_head


def common_keys(s: Shape) -> Keys:
    """The keys that every architecture has; its own come on top."""
    return {
        "block_count": s.n_layer,
        "context_length": s.n_ctx,
        "embedding_length": s.n_embd,
        "feed_forward_length": s.n_ff,
        "attention.head_count": s.n_head,
        "attention.head_count_kv": s.n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": s.head,
        "expert_count": s.n_expert,
        "expert_used_count": s.n_used,
    }


def expert_width(s: Shape) -> Keys:
    """For experts with a width key of their own."""
    return {"expert_feed_forward_length": s.n_ff_exp}


def plain_width(s: Shape) -> Keys:
    """For architectures whose experts are as wide as a dense network would be."""
    return {"feed_forward_length": s.n_ff_exp}


def gated(s: Shape, function: int | None = SIGMOID) -> Keys:
    """For architectures that state how the router's scores become weights."""
    return expert_width(s) | {
        "leading_dense_block_count": s.n_dense,
        "expert_shared_count": 1,
        "expert_gating_func": function,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
    }


def named(layer: int, suffix: str = "weight", /, **weights: tuple[int, ...]) -> Weights:
    """Tensors of a block: `blk.LAYER.NAME.SUFFIX`."""
    return [(f"blk.{layer}.{name}.{suffix}", ne) for name, ne in weights.items()]


def norm(i: int, s: Shape, *names: str) -> Weights:
    """Norms of the model's width; `ffn_norm` if none is named."""
    return named(i, **dict.fromkeys(names or ("ffn_norm",), (s.n_embd,)))


def attention(i: int, s: Shape, *, norms: str = "", bias: bool = False, head: int | None = None) -> Weights:
    """Attention and the norm before it.  `norms`: "head" or "full" for a q and a k norm of that width."""
    width = s.head if head is None else head
    q, kv = width * s.n_head, width * s.n_head_kv
    out = norm(i, s, "attn_norm") + named(i, attn_q=(s.n_embd, q), attn_k=(s.n_embd, kv), attn_v=(s.n_embd, kv))
    out += named(i, attn_output=(q, s.n_embd))
    if norms:
        out += named(i, attn_q_norm=(width if norms == "head" else q,), attn_k_norm=(width if norms == "head" else kv,))
    return out + (named(i, "bias", attn_q=(q,), attn_k=(kv,), attn_v=(kv,)) if bias else [])


def dense(i: int, s: Shape, suffix: str = "", width: int | None = None, *, gate: bool = True) -> Weights:
    """A feed-forward network: that of a dense block, or with `suffix` "_shexp" the shared expert."""
    ff = s.n_ff if width is None else width
    roles = {"gate": (s.n_embd, ff), "up": (s.n_embd, ff), "down": (ff, s.n_embd)}
    return named(i, **{f"ffn_{role}{suffix}": ne for role, ne in roles.items() if gate or role != "gate"})


def experts(
    i: int, s: Shape, *, gate: bool = True, merged: bool = False, bias: bool = False, width: int | None = None
) -> Weights:
    """The router and the routed experts.  `bias`: on the scores that choose; `width`: of the experts' input, if not n_embd."""
    n, ff, e = s.n_embd if width is None else width, s.n_ff_exp, s.n_expert
    out = named(i, ffn_gate_inp=(s.n_embd, e)) + (named(i, "bias", exp_probs_b=(e,)) if bias else [])
    if merged:
        return out + named(i, ffn_gate_up_exps=(n, 2 * ff, e), ffn_down_exps=(ff, n, e))
    out += named(i, ffn_gate_exps=(n, ff, e)) if gate else []
    return out + named(i, ffn_up_exps=(n, ff, e), ffn_down_exps=(ff, n, e))


def shared(i: int, s: Shape) -> Weights:
    """A shared expert as wide as a routed one."""
    return dense(i, s, "_shexp", s.n_ff_exp)


def led(i: int, s: Shape, moe: Weights) -> Weights:
    """`moe`, or in one of the leading blocks the dense network."""
    return dense(i, s) if i < s.n_dense else moe


def mtp(i: int, s: Shape) -> Weights:
    """What makes a block at the end an MTP block; nothing for a block of the trunk."""
    if i < s.n_layer - s.n_mtp:
        return []
    return named(i, **{"nextn.eh_proj": (2 * s.n_embd, s.n_embd), "nextn.enorm": (s.n_embd,), "nextn.hnorm": (s.n_embd,)})
