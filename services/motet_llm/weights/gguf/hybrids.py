"""Derive the config of models with recurrent layers from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from motet_shared.errors import ConfigError

from .header import Header


def lfm2(header: Header) -> dict[str, Any]:
    """Return LFM2's fields: a layer without heads of keys is a convolution."""
    heads = header.need("attention.head_count_kv")
    if not isinstance(heads, list) or not any(heads):
        raise ConfigError(
            f"{header.path.name}: lfm2.attention.head_count_kv={heads!r} must be a number per layer; "
            "convert the model again"
        )
    return {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "norm_eps": header.need("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": header.need("shortconv.l_cache"),
        "conv_bias": "blk.0.shortconv.in_proj.bias" in header.tensors,
        "block_auto_adjust_ff_dim": False,  # the file states the width of the matrices
    }


def qwen35(header: Header) -> dict[str, Any]:
    """Return Qwen3.5's fields: gated delta rules, and every few layers attention."""
    dim, value_heads = header.need("attention.key_length"), header.need("ssm.time_step_rank")
    sections = [size for size in header.need("rope.dimension_sections") if size]
    return {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "num_hidden_layers": decoder_layers(header),
        "full_attention_interval": header.need("full_attention_interval"),
        "linear_conv_kernel_dim": header.need("ssm.conv_kernel"),
        "linear_key_head_dim": header.need("ssm.state_size"),
        "linear_num_key_heads": header.need("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": header.need("ssm.inner_size") // value_heads,
        "rope": {
            "mrope_section": sections,
            "mrope_interleaved": True,
            "partial_rotary_factor": header.need("rope.dimension_count") / dim,
        },
    }


def qwen35moe(header: Header) -> dict[str, Any]:
    return qwen35(header) | {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "moe_intermediate_size": header.need("expert_feed_forward_length"),
        "shared_expert_intermediate_size": header.need("expert_shared_feed_forward_length"),
        "num_experts": header.need("expert_count"),
        "num_experts_per_tok": header.need("expert_used_count"),
    }


def decoder_layers(header: Header) -> int:
    """Return how many layers the decoder has, without those that predict further tokens."""
    return int(header.need("block_count") - header.get("nextn_predict_layers", 0))
