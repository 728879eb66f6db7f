"""Name what is particular to each of llama.cpp's architectures: its config beyond the common part.

The left column of `ARCHITECTURES` is `general.architecture`. Values that a file does not state are
those which llama.cpp has in its code, or, where it has none, those of the published models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from motet_shared.errors import ConfigError

from . import gemma
from .header import Header
from .hybrids import lfm2, qwen35, qwen35moe

_GATES = {1: "softmax", 2: "sigmoid"}  # expert_gating_func


@dataclass(frozen=True, slots=True)
class Architecture:
    """Describe how an architecture's metadata becomes a config.

    config: returns the config fields beyond the common ones. rotates: True with rotary embeddings.
    """

    config: Callable[[Header], dict[str, Any]]
    rotates: bool = True


def find_architecture(header: Header) -> Architecture:
    """Return the architecture of a file. Raises ConfigError if it is not read."""
    name, found = header.architecture, ARCHITECTURES.get(header.architecture)
    if found is not None:
        return found
    if (reason := REFUSED.get(name)) is not None:
        raise ConfigError(
            f"{header.path.name}: general.architecture={name!r} is not served: {reason}; "
            "give a file of another model"
        )
    known = ", ".join(ARCHITECTURES)
    raise ConfigError(f"{header.path.name}: general.architecture={name!r} is not read; {known} are")


# ------------------------------------------------------------------------------------------ dense
def _llama(header: Header) -> dict[str, Any]:
    if header.get("expert_count"):
        return {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            **_experts(header, count="num_local_experts"),
        }
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": "blk.0.attn_output.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
    }


def _qwen2(header: Header) -> dict[str, Any]:
    return {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


def _qwen3(header: Header) -> dict[str, Any]:
    return {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def _phi3(header: Header) -> dict[str, Any]:
    window = header.get("attention.sliding_window")
    original = header.get("rope.scaling.original_context_length")
    return {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "sliding_window": window or None,
        "original_max_position_embeddings": original,
        "rope": {"partial_rotary_factor": _rotated_share(header)},
    }


def _starcoder2(header: Header) -> dict[str, Any]:
    return {
        "model_type": "starcoder2",
        "architectures": ["Starcoder2ForCausalLM"],
        "norm_epsilon": header.need("attention.layer_norm_epsilon"),
        "use_bias": "blk.0.attn_q.bias" in header.tensors,
        "sliding_window": header.get("attention.sliding_window") or None,
    }


def _gpt2(header: Header) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "layer_norm_epsilon": header.need("attention.layer_norm_epsilon"),
        "n_inner": header.get("feed_forward_length"),
    }


def _stablelm(header: Header) -> dict[str, Any]:
    parallel = "blk.0.ffn_norm.weight" not in header.tensors
    return {
        "model_type": "stablelm",
        "architectures": ["StableLmForCausalLM"],
        "layer_norm_eps": header.need("attention.layer_norm_epsilon"),
        "use_qkv_bias": "blk.0.attn_q.bias" in header.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in header.tensors,
        "use_parallel_residual": header.get("use_parallel_residual", parallel),
        "rope": {"partial_rotary_factor": _rotated_share(header)},
    }


def _nemotron(header: Header) -> dict[str, Any]:
    eps = header.get("attention.layer_norm_rms_epsilon")
    return {
        "model_type": "nemotron",
        "architectures": ["NemotronForCausalLM"],
        "norm_eps": header.get("attention.layer_norm_epsilon", eps),
        "attention_bias": "blk.0.attn_output.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
        "rope": {"partial_rotary_factor": _rotated_share(header)},
    }


def _rotated_share(header: Header) -> float:
    """Return which share of a head rotates."""
    heads, hidden = header.need("attention.head_count"), header.need("embedding_length")
    dim = header.get("attention.key_length", hidden // heads)
    return float(header.get("rope.dimension_count", dim) / dim)


# ---------------------------------------------------------------------------------------- experts
def _experts(header: Header, *, count: str, width: str = "intermediate_size") -> dict[str, Any]:
    """Return the experts' number, under the name `count`, and width."""
    dense = header.get("feed_forward_length")
    return {
        count: header.need("expert_count"),
        "num_experts_per_tok": header.need("expert_used_count"),
        width: header.get("expert_feed_forward_length", dense),
    }


def _qwen2moe(header: Header) -> dict[str, Any]:
    shared = header.get("expert_shared_feed_forward_length")
    return {
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        **_experts(header, count="num_experts", width="moe_intermediate_size"),
        "shared_expert_intermediate_size": shared or _rows(header, "blk.0.ffn_up_shexp.weight"),
        "norm_topk_prob": header.get("expert_weights_norm", False),
    }


def _qwen3moe(header: Header) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        **_experts(header, count="num_experts", width="moe_intermediate_size"),
        "norm_topk_prob": header.get("expert_weights_norm", True),
    }


def _gpt_oss(header: Header) -> dict[str, Any]:
    rope = {"truncate": False} if header.get("rope.scaling.type") == "yarn" else {}
    return {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        **_experts(header, count="num_local_experts"),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "sliding_window": header.need("attention.sliding_window"),
        "rope": rope,
    }


def _minimax_m2(header: Header) -> dict[str, Any]:
    gate = _GATES.get(header.get("expert_gating_func", 2))
    if gate != "sigmoid":
        raise ConfigError(
            f"{header.path.name}: minimax-m2.expert_gating_func="
            f"{header.get('expert_gating_func')!r} is not read, 2 (sigmoid) is; convert it again"
        )
    return {
        "model_type": "minimax_m2",
        "architectures": ["MiniMaxM2ForCausalLM"],
        **_experts(header, count="num_local_experts"),
        "rope": {"partial_rotary_factor": _rotated_share(header)},
    }


def _rows(header: Header, name: str) -> int | None:
    found = header.tensors.get(name)
    return None if found is None else found.shape[0]


ARCHITECTURES = {
    "llama": Architecture(_llama),
    "qwen2": Architecture(_qwen2),
    "qwen3": Architecture(_qwen3),
    "gemma": Architecture(gemma.gemma),
    "gemma2": Architecture(gemma.gemma2),
    "gemma3": Architecture(gemma.gemma3),
    "phi3": Architecture(_phi3),
    "starcoder2": Architecture(_starcoder2),
    "gpt2": Architecture(_gpt2, rotates=False),
    "stablelm": Architecture(_stablelm),
    "nemotron": Architecture(_nemotron),
    "qwen2moe": Architecture(_qwen2moe),
    "qwen3moe": Architecture(_qwen3moe),
    "gpt-oss": Architecture(_gpt_oss),
    "minimax-m2": Architecture(_minimax_m2),
    "lfm2": Architecture(lfm2),
    "qwen35": Architecture(qwen35),
    "qwen35moe": Architecture(qwen35moe),
}

# The rest of transformers' mapping, with the reason of each.
REFUSED = {
    "bloom": "BloomForCausalLM takes no attention function from outside",
    "deci": "transformers has no class for it, whose layers differ in size",
    "gemma4": "layers that share keys, and heads of two sizes, are not read from GGUF",
    "falcon": "FalconForCausalLM takes no attention function from outside",
    "mamba": "no layer attends: models without a KV cache are not served",
    "t5": "it is an encoder-decoder",
    "t5encoder": "it is an encoder",
}
