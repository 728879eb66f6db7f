"""Build tiny models of the families whose layers have latent or recurrent states."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

from motet_llm.attention import paged as attention
from motet_llm.models import mixers

_SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_MAMBA2 = {
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_CONV = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}

LATENT: dict[str, dict[str, Any]] = {
    "axk1": _MLA,
    "deepseek_v2": _MLA | {"q_lora_rank": None},
    "deepseek_v2 yarn": _MLA | {"rope_parameters": _YARN, "attention_bias": True},
    "deepseek_v3": _MLA,
    "deepseek_v3 yarn": _MLA
    | {"rope_parameters": _YARN, "q_lora_rank": None, "rope_interleave": False},
    "glm4_moe_lite": _MLA,
    "longcat_flash": _MLA
    | {"num_layers": 2, "num_hidden_layers": 4, "head_dim": 8, "moe_topk": 2, "zero_expert_num": 2}
    | {"expert_ffn_hidden_size": 32, "ffn_hidden_size": 96},
    "minicpm3": _MLA,
    "mistral4": _MLA | {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1}},
    "youtu": _MLA,
}
RECURRENT: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _MLA
    | {
        "q_lora_rank": None,
        "layer_types": _DELTA["layer_types"],
        "linear_num_heads": 4,
        "linear_head_dim": 16,
    },
    "bamba": _MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": _MAMBA2
    | {
        "mamba_d_ssm": 128,
        "head_dim": 16,
        "mamba_rms_norm": True,
        "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 0.8],
    }
    | {"ssm_in_multiplier": 0.7, "ssm_out_multiplier": 0.6, "attention_in_multiplier": 0.8},
    "falcon_h1 without norm": _MAMBA2
    | {"mamba_d_ssm": 128, "head_dim": 16, "mamba_rms_norm": False},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "granitemoehybrid": _MAMBA2
    | {
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    | {
        "shared_intermediate_size": 64,
        "position_embedding_type": "rope",
        "embedding_multiplier": 2.0,
    }
    | {"residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    "jamba": {"mamba_d_state": 8, "mamba_dt_rank": 4, "num_hidden_layers": 4, "num_experts": 4}
    | {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "kimi_linear": _MLA
    | {
        "q_lora_rank": None,
        "layer_types": _DELTA["layer_types"],
        "linear_num_heads": 4,
        "linear_head_dim": 16,
    },
    "lfm2": _CONV,
    "lfm2_moe": _CONV | _MOE | {"num_dense_layers": 1},
    "lfm3": _CONV,
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "expand": 2,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*-M",
        "num_hidden_layers": 4,
        "mamba_num_heads": 8,
        "expand": 2,
    }
    | {"mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16, "head_dim": 16},
    "olmo_hybrid": _DELTA,
    "qwen3_5_moe_text": _DELTA | _MOE | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA | _MOE | {"shared_expert_intermediate_size": 32},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}
    | {"num_key_value_heads": 4, "mamba_d_state": 8, "mamba_dt_rank": 4, "n_mamba_heads": 2},
    "zamba2": {
        "mamba_d_state": 16,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "chunk_size": 16,
    }
    | {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_mem_blocks": 1,
    }
    | {
        "num_key_value_heads": 4,
        "hybrid_layer_ids": [1, 3],
        "use_mem_rope": True,
        "adapter_rank": 8,
    }
    | {"use_shared_attention_adapter": True, "mamba_expand": 2},
}


def tiny_config(name: str, **overrides: Any) -> PreTrainedConfig:
    sizes = _SIZES | (LATENT.get(name) or RECURRENT.get(name) or {}) | overrides
    config: PreTrainedConfig = AutoConfig.for_model(name.split()[0], **sizes)
    return config


def tiny_model(name: str, **overrides: Any) -> PreTrainedModel:
    """Return a float32 model of a family above, with fixed weights; a variant follows a space.

    It is wide enough for answers to vary, and small enough that float32 noise stays well under
    1e-4.
    """
    config = tiny_config(name, **overrides)
    # transformers names Mistral 4 only as a part of a multimodal model.
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), Mistral4ForCausalLM)
    torch.manual_seed(0)
    model: PreTrainedModel = kind(config).float().eval().requires_grad_(False)
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1 and "A_log" not in key:
            parameter.normal_(std=0.3 if "embed" in key else 0.1)
        elif "dt" in key or key.endswith(".D"):
            parameter.normal_()
    return model


def with_mixers(reference: PreTrainedModel) -> PreTrainedModel:
    """Return a copy that runs as in the engine: packed rows and a layout."""
    AttentionInterface.register(attention.NAME, attention.paged_attention)
    model = copy.deepcopy(reference)
    model.config._attn_implementation = attention.NAME
    mixers.install(model)
    return model
