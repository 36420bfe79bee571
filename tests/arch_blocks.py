"""The blocks of the architectures that do not fit a line of the table in `archs`, each with the keys that it needs.

Source: `load_arch_hparams` and `load_arch_tensors` of llama.cpp src/models/*.cpp, build 11549.
"""

from __future__ import annotations

from arch_parts import (
    N_VOCAB,
    SQRT_SOFTPLUS,
    Keys,
    Shape,
    Weights,
    attention,
    dense,
    expert_width,
    experts,
    gated,
    led,
    mtp,
    named,
    norm,
    plain_width,
    shared,
)

LORA = 32  # rank of the low-rank projections of DeepSeek's attention
ROPE, NOPE, MLA_VALUE = 16, 16, 16  # parts of a key of DeepSeek V2's attention, and a value
STATE, KEY_HEADS, VALUE_HEADS = 16, 2, 4  # of Qwen3-Next's delta net and of Nemotron-H's Mamba 2
STREAMS, OUT_GROUPS, HASH_LAYERS = 4, 2, 2  # of DeepSeek V4


def granitemoe_keys(s: Shape) -> Keys:
    """Granite scales the embeddings, the residuals, attention and the logits."""
    return plain_width(s) | {"logit_scale": 2.0, "residual_scale": 0.5, "embedding_scale": 1.5, "attention.scale": 0.25}


def deepseek2_keys(s: Shape) -> Keys:
    """Multi-head latent attention: one key head, of the compressed width and the rotated part."""
    return gated(s) | {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": LORA,
        "attention.kv_lora_rank": LORA,
        "attention.key_length": LORA + ROPE,
        "attention.value_length": LORA,
        "attention.key_length_mla": NOPE + ROPE,
        "attention.value_length_mla": MLA_VALUE,
        "rope.dimension_count": ROPE,
    }


def deepseek2(i: int, s: Shape) -> Weights:
    """Leading dense blocks, then experts with a bias on the scores and a shared expert."""
    out = norm(i, s, "attn_norm", "ffn_norm") + named(i, attn_q_a_norm=(LORA,), attn_kv_a_norm=(LORA,))
    out += named(i, attn_q_a=(s.n_embd, LORA), attn_q_b=(LORA, s.n_head * (NOPE + ROPE)))
    out += named(i, attn_kv_a_mqa=(s.n_embd, LORA + ROPE), attn_k_b=(NOPE, LORA, s.n_head))
    out += named(i, attn_v_b=(LORA, MLA_VALUE, s.n_head), attn_output=(s.n_head * MLA_VALUE, s.n_embd))
    return out + led(i, s, experts(i, s, bias=True) + shared(i, s))


def glm4moe(i: int, s: Shape) -> Weights:
    """As GLM 4.5: biased attention, leading dense blocks, and experts in the MTP block too."""
    out = attention(i, s, norms="head", bias=True) + norm(i, s, "post_attention_norm")
    return out + led(i, s, experts(i, s, bias=True) + shared(i, s)) + mtp(i, s)


def gpt_oss(i: int, s: Shape) -> Weights:
    """A bias on everything, the experts included, and attention sinks."""
    e, ff = s.n_expert, s.n_ff_exp
    out = attention(i, s, bias=True) + named(i, attn_sinks=(s.n_head,)) + norm(i, s, "post_attention_norm") + experts(i, s)
    out += named(i, "bias", attn_output=(s.n_embd,), ffn_gate_inp=(e,), ffn_gate_exps=(ff, e), ffn_up_exps=(ff, e))
    return out + named(i, "bias", ffn_down_exps=(s.n_embd, e))


def gemma4_keys(s: Shape) -> Keys:
    """Blocks with a sliding window and with full attention in turn, whose heads differ in width."""
    return expert_width(s) | {
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": [i % 2 == 0 for i in range(s.n_layer)],
        "attention.key_length": 2 * s.head,
        "attention.value_length": 2 * s.head,
        "attention.key_length_swa": s.head,
        "attention.value_length_swa": s.head,
        "attention.shared_kv_layers": 0,
        "rope.dimension_count": 2 * s.head,
        "rope.dimension_count_swa": s.head,
        "embedding_length_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    }


def gemma4(i: int, s: Shape) -> Weights:
    """A dense network beside merged experts, which have a scale each; the router has a scale per input."""
    out = attention(i, s, norms="head", head=s.head if i % 2 == 0 else 2 * s.head)
    out += norm(
        i, s, "post_attention_norm", "ffn_norm", "post_ffw_norm", "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"
    )
    scales = named(i, "scale", ffn_gate_inp=(s.n_embd,), ffn_down_exps=(s.n_expert,))
    return out + dense(i, s) + experts(i, s, merged=True) + scales


def qwen3next_keys(s: Shape) -> Keys:
    """Also those of qwen35moe, which asks for the rope sections; they sum to half a head."""
    return expert_width(s) | {
        "expert_shared_feed_forward_length": s.n_ff_exp,
        "full_attention_interval": 2,
        "rope.dimension_sections": [s.head // 2 - 4, 2, 2, 0],
        "ssm.conv_kernel": 4,
        "ssm.inner_size": STATE * VALUE_HEADS,
        "ssm.state_size": STATE,
        "ssm.time_step_rank": VALUE_HEADS,
        "ssm.group_count": KEY_HEADS,
    }


def qwen3next(i: int, s: Shape) -> Weights:
    """Qwen3-Next: one projection for the delta net's beta and alpha."""
    return _qwen_hybrid(i, s, named(i, ssm_ba=(s.n_embd, 2 * VALUE_HEADS)))


def qwen35moe(i: int, s: Shape) -> Weights:
    """Qwen3.5: a projection for each."""
    return _qwen_hybrid(i, s, named(i, ssm_beta=(s.n_embd, VALUE_HEADS), ssm_alpha=(s.n_embd, VALUE_HEADS)))


def _qwen_hybrid(i: int, s: Shape, gates: Weights) -> Weights:
    """Every second block has attention with a gate beside q, the others a delta net; all have a gated shared expert."""
    if i % 2:
        out = [w for w in attention(i, s, norms="head") if not w[0].endswith("attn_q.weight")]
        out += named(i, attn_q=(s.n_embd, 2 * s.head * s.n_head))
    else:
        value, channels = STATE * VALUE_HEADS, 2 * STATE * KEY_HEADS + STATE * VALUE_HEADS
        out = norm(i, s, "attn_norm") + named(i, attn_qkv=(s.n_embd, channels), attn_gate=(s.n_embd, value)) + gates
        out += named(i, ssm_conv1d=(4, channels), ssm_norm=(STATE,), ssm_out=(value, s.n_embd))
        out += [(f"blk.{i}.ssm_dt.bias", (VALUE_HEADS,)), (f"blk.{i}.ssm_a", (VALUE_HEADS,))]
    out += norm(i, s, "post_attention_norm") + experts(i, s, merged=True)
    return out + shared(i, s) + named(i, ffn_gate_inp_shexp=(s.n_embd,))


def cohere2moe_keys(s: Shape) -> Keys:
    """A layer norm instead of the RMS norm: with both keys the loader would take the latter."""
    return gated(s) | {
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": None,
        "attention.sliding_window": 16,
        "logit_scale": 0.5,
        "nextn_predict_layers": s.n_mtp,
    }


def cohere2moe(i: int, s: Shape) -> Weights:
    """Attention and merged experts side by side, after one norm."""
    return attention(i, s) + led(i, s, experts(i, s, merged=True) + shared(i, s)) + mtp(i, s)


def bailingmoe2_keys(s: Shape) -> Keys:
    """Experts in groups of two, of which half may be chosen from."""
    return gated(s) | {"expert_group_count": s.n_expert // 2, "expert_group_used_count": s.n_expert // 4}


def bailingmoe2(i: int, s: Shape) -> Weights:
    """Attention from one tensor."""
    q, kv = s.head * s.n_head, s.head * s.n_head_kv
    out = norm(i, s, "attn_norm", "ffn_norm") + named(i, attn_q_norm=(s.head,), attn_k_norm=(s.head,))
    out += named(i, attn_qkv=(s.n_embd, q + 2 * kv), attn_output=(q, s.n_embd))
    return out + led(i, s, experts(i, s, bias=True) + shared(i, s))


def lfm2moe_keys(s: Shape) -> Keys:
    """A block without key heads is a convolution."""
    return gated(s) | {"shortconv.l_cache": 3, "attention.head_count_kv": [i % 2 * s.n_head_kv for i in range(s.n_layer)]}


def lfm2moe(i: int, s: Shape) -> Weights:
    """Attention in every second block, a short convolution in the others."""
    sizes = {"conv": (3, s.n_embd), "in_proj": (s.n_embd, 3 * s.n_embd), "out_proj": (s.n_embd, s.n_embd)}
    convolution = norm(i, s, "attn_norm") + named(i, **{f"shortconv.{name}": ne for name, ne in sizes.items()})
    return (attention(i, s, norms="head") if i % 2 else convolution) + norm(i, s) + led(i, s, experts(i, s, bias=True))


def grovemoe_keys(s: Shape) -> Keys:
    """Two neighbours share an adjugate expert."""
    return expert_width(s) | {"expert_chunk_feed_forward_length": 32, "expert_group_scale": 0.05, "experts_per_group": 2}


def grovemoe(i: int, s: Shape) -> Weights:
    """A second, smaller set of experts, found by the id of the first: its stacks stay in the dense file."""
    n, e = s.n_embd, s.n_expert // 2
    adjugate = named(i, ffn_gate_chexps=(n, 32, e), ffn_up_chexps=(n, 32, e), ffn_down_chexps=(32, n, e))
    return attention(i, s, norms="head") + norm(i, s) + experts(i, s) + adjugate


def nemotron_h_moe_keys(s: Shape) -> Keys:
    """Blocks in turn of attention, Mamba 2 and experts, told by the heads and widths of each."""
    kinds = [i % 3 for i in range(s.n_layer)]
    return gated(s, None) | {
        "leading_dense_block_count": None,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.head_count": [s.n_head if kind == 0 else 0 for kind in kinds],
        "attention.head_count_kv": [s.n_head_kv if kind == 0 else 0 for kind in kinds],
        "feed_forward_length": [s.n_ff_exp if kind == 2 else 0 for kind in kinds],
        "expert_shared_feed_forward_length": s.n_ff,
        "moe_latent_size": s.n_ff_exp,  # the width in which the experts live
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 2 * s.n_embd,
        "ssm.state_size": STATE,
        "ssm.time_step_rank": VALUE_HEADS,
        "ssm.group_count": KEY_HEADS,
    }


def nemotron_h_moe(i: int, s: Shape) -> Weights:
    """The experts have no gate."""
    if i % 3 == 0:
        return attention(i, s)
    if i % 3 == 1:
        return _mamba2(i, s)
    latent = named(i, ffn_latent_down=(s.n_embd, s.n_ff_exp), ffn_latent_up=(s.n_ff_exp, s.n_embd))
    routed = experts(i, s, gate=False, bias=True, width=s.n_ff_exp)
    return norm(i, s, "attn_norm") + routed + latent + dense(i, s, "_shexp", gate=False)


def _mamba2(i: int, s: Shape) -> Weights:
    inner, groups, heads = 2 * s.n_embd, KEY_HEADS, VALUE_HEADS
    channels = inner + 2 * groups * STATE
    out = norm(i, s, "attn_norm") + named(i, ssm_in=(s.n_embd, inner + channels + heads), ssm_out=(inner, s.n_embd))
    out += named(i, ssm_conv1d=(4, channels), ssm_norm=(inner // groups, groups))
    out += named(i, "bias", ssm_conv1d=(channels,), ssm_dt=(heads,))
    return [*out, (f"blk.{i}.ssm_a", (1, heads)), (f"blk.{i}.ssm_d", (1, heads))]


def llama4(i: int, s: Shape) -> Weights:
    """Experts in every second block."""
    return attention(i, s) + norm(i, s) + (experts(i, s) + shared(i, s) if i % 2 else dense(i, s))


def phimoe(i: int, s: Shape) -> Weights:
    """Layer norms and attention with biases."""
    width = (s.n_embd,)
    biases = named(i, "bias", attn_norm=width, ffn_norm=width, attn_output=width)
    return attention(i, s, bias=True) + norm(i, s) + experts(i, s) + biases


def deepseek4_keys(s: Shape) -> Keys:
    """Blocks that attend to all keys, to keys compressed by 4 and by 128, in turn."""
    return gated(s, SQRT_SOFTPLUS) | {
        "leading_dense_block_count": None,
        "attention.head_count_kv": 1,
        "attention.key_length": s.head,
        "attention.value_length": s.head,
        "attention.q_lora_rank": LORA,
        "attention.sliding_window": 16,
        "attention.output_group_count": OUT_GROUPS,
        "attention.output_lora_rank": LORA,
        "attention.compress_ratios": [_ratio(i) for i in range(s.n_layer)],
        "attention.compress_rope_freq_base": 160000.0,
        "attention.indexer.head_count": 2,
        "attention.indexer.key_length": _indexer_head(s),
        "attention.indexer.top_k": 8,
        "hyper_connection.count": STREAMS,
        "hyper_connection.sinkhorn_iterations": 2,
        "hyper_connection.epsilon": 1e-6,
        "hash_layer_count": HASH_LAYERS,
        "swiglu_clamp_exp": 10.0,
        "rope.dimension_count": s.head // 2,
    }


def deepseek4_ends(s: Shape) -> Weights:
    """What folds the parallel residual streams into one at the end."""
    sizes = {"fn": (STREAMS * s.n_embd, STREAMS), "base": (STREAMS,), "scale": (1,)}
    return [(f"output_hc_{name}.weight", ne) for name, ne in sizes.items()]


def deepseek4(i: int, s: Shape) -> Weights:
    """The first blocks choose experts by a table of token ids, beside which a router's weights only weigh."""
    q, mixing = s.n_head * s.head, (2 + STREAMS) * STREAMS
    out = norm(i, s, "attn_norm", "ffn_norm") + named(i, attn_q_a_norm=(LORA,), attn_kv_a_norm=(s.head,))
    out += named(i, attn_sinks=(s.n_head,), attn_q_a=(s.n_embd, LORA), attn_q_b=(LORA, q), attn_kv=(s.n_embd, s.head))
    out += named(i, attn_output_a=(q // OUT_GROUPS, OUT_GROUPS * LORA), attn_output_b=(OUT_GROUPS * LORA, s.n_embd))
    sizes = {"fn": (STREAMS * s.n_embd, mixing), "base": (mixing,), "scale": (3,)}
    out += named(i, **{f"hc_{part}_{name}": ne for part in ("attn", "ffn") for name, ne in sizes.items()})
    out += experts(i, s, bias=i >= HASH_LAYERS) + shared(i, s) + _compressor(i, s)
    return out + (named(i, ffn_gate_tid2eid=(s.n_used, N_VOCAB)) if i < HASH_LAYERS else [])


def _ratio(i: int) -> int:
    return (0, 4, 128)[i % 3]


def _indexer_head(s: Shape) -> int:
    """A multiple of 64, for the Hadamard rotation; with the model's own head width llama.cpp divides by zero."""
    return 128 if s.head == 64 else 64


def _compressor(i: int, s: Shape) -> Weights:
    """Attention over compressed keys, and at ratio 4 the indexer that chooses among them."""
    ratio = _ratio(i)
    if not ratio:
        return []
    wide = s.head * (2 if ratio == 4 else 1)
    out = named(i, attn_compressor_kv=(s.n_embd, wide), attn_compressor_gate=(s.n_embd, wide))
    out += named(i, attn_compressor_ape=(wide, ratio), attn_compressor_norm=(s.head,))
    if ratio == 4:
        head, wide = _indexer_head(s), 2 * _indexer_head(s)
        out += named(i, **{"indexer.proj": (s.n_embd, 2), "indexer.attn_q_b": (LORA, wide)})
        out += named(i, indexer_compressor_kv=(s.n_embd, wide), indexer_compressor_gate=(s.n_embd, wide))
        out += named(i, indexer_compressor_ape=(wide, ratio), indexer_compressor_norm=(head,))
    return out
