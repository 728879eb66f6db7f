"""Build a tiny model of every causal language model class of transformers.

`tiny_config` shrinks every size that it knows by name and enables what configs disable by default:
windows, more than one expert per token, scales other than one. `OVERRIDES` holds what these rules
do not cover, by class; `VARIANTS` holds configs that select other code.
"""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from support.checkpoints import tiny_mixers
from support.checkpoints.language_checkpoints import EOS, VOCAB

LAYERS = 4
WINDOW = 12
CONTEXT = 512

_SIZES: dict[str, Any] = {}
for _value, _names in (
    (VOCAB, "vocab_size vocab_size_per_layer_input"),
    (64, "hidden_size n_embd d_model embed_dim word_embed_proj_dim embedding_size lru_width"),
    (LAYERS, "num_hidden_layers n_layer n_layers layers num_layers"),
    (4, "num_attention_heads n_head n_heads attention_heads"),
    (2, "num_key_value_heads index_n_heads num_kv_shared_layers max_window_layers"),
    (16, "head_dim kv_channels kv_lora_rank index_head_dim rotary_dim"),
    (32, "global_head_dim"),
    (24, "q_lora_rank"),
    (8, "qk_rope_head_dim index_topk hidden_size_per_layer_input laurel_rank"),
    (12, "qk_nope_head_dim v_head_dim"),
    (
        96,
        "intermediate_size ffn_dim dff n_inner ffn_hidden_size intermediate_size_mlp dense_intermediate_size",
    ),
    (96, "prefix_dense_intermediate_size"),
    (
        32,
        "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size",
    ),
    (32, "shared_experts_intermediate_size"),
    (8, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (3, "num_experts_per_tok moe_topk moe_k top_k_experts moe_layer_end_index"),
    (
        1,
        "num_shared_experts n_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers",
    ),
    (2, "n_group"),
    (1, "topk_group"),
    (WINDOW, "sliding_window local_attention attention_window_size"),
    (32, "attention_chunk_size"),
    (CONTEXT, "max_position_embeddings n_positions max_seq_len"),
    (EOS, "eos_token_id"),
    (VOCAB - 3, "pad_token_id"),
    (None, "bos_token_id cls_token_id sep_token_id"),
    (1.5, "embedding_multiplier"),
    (2.5, "logits_scaling"),
    (0.7, "residual_multiplier"),
    (0.2, "attention_multiplier"),
    (0.5, "logit_scale"),
    (20, "floor_scale"),
    (2.0, "attn_logit_softcapping"),
    (10.0, "final_logit_softcapping"),
    (True, "use_sliding_window is_decoder"),
):
    _SIZES |= dict.fromkeys(_names.split(), _value)

_MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_TOKENS = {"bos_token_id": 1, "cls_token_id": 1, "sep_token_id": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_PLAIN = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_hidden_layers": LAYERS,
}
_BLT = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 96,
}
_SCALES_EMBEDDINGS = ("biogpt", "gemma", "minicpm3", "vaultgemma")
_LATENT = {"num_key_value_heads": LAYERS}

OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        "AXK1ForCausalLM AXK2ForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM "
        "Dots3NoteForCausalLM Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM HYV4ForCausalLM MiniCPM3ForCausalLM "
        "Mistral4ForCausalLM YoutuForCausalLM".split(),
        _LATENT,
    ),
    **dict.fromkeys(
        "Dots1ForCausalLM Exaone4ForCausalLM Gemma3ForCausalLM Gemma3nForCausalLM Gemma4ForCausalLM "
        "Kolibri1ForCausalLM LagunaForCausalLM MellumForCausalLM MinistralForCausalLM".split(),
        _MIXED,
    ),
    "CohereCompassForCausalLM": _MIXED
    | {
        "rope_parameters": {
            "sliding_attention": _ROPE,
            "full_attention": _ROPE | {"rope_theta": 500.0},
        }
    },
    "BltForCausalLM": {
        "encoder_hash_byte_group_vocab": 64,
        "patcher_config": _BLT,
        "encoder_config": _BLT,
        "decoder_config": _BLT,
        "global_config": _BLT,
    },
    "CwmForCausalLM": {"bos_token_id": 1},
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {
            "hidden_size": 64,
            "ffn_hidden_size": 32,
            "moe_num_experts": 8,
            "moe_top_k": 3,
        },
    },
    "Emu3ForCausalLM": {"bos_token_id": 1},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 2]]},
    "Gemma4AssistantForCausalLM": {"text_config": _PLAIN | {"num_kv_shared_layers": LAYERS}},
    "Gemma4UnifiedAssistantForCausalLM": {"text_config": _PLAIN | {"num_kv_shared_layers": LAYERS}},
    "Gemma4UnifiedForCausalLM": _MIXED,
    "Lfm3ForCausalLM": {
        "layer_types": ["conv", "sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
    },
    "LongcatFlashForCausalLM": _LATENT | {"head_dim": 8, "num_layers": 2, "zero_expert_num": 4},
    "MllamaForCausalLM": {"bos_token_id": 1, "cross_attention_layers": [1]},
    "ModernBertDecoderForCausalLM": _TOKENS,
    "ReformerModelWithLMHead": {"axial_pos_embds": False},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}


def _scaled(kind: str, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = 32
    return {"rope_parameters": rope | more}


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONG = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
# Name of the variant: the class, and what its config sets besides.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama, linear rope": ("LlamaForCausalLM", _scaled("linear")),
    "llama, llama3 rope": ("LlamaForCausalLM", _scaled("llama3", **_LLAMA3)),
    "llama, yarn": ("LlamaForCausalLM", _scaled("yarn")),
    "llama, short yarn": (
        "LlamaForCausalLM",
        _scaled("yarn") | {"max_position_embeddings": 32},
    ),
    "llama, longrope": ("LlamaForCausalLM", _scaled("longrope", **_LONG)),
    "llama, dynamic rope": (
        "LlamaForCausalLM",
        _scaled("dynamic") | {"max_position_embeddings": 32},
    ),
    "llama, biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "mistral, no window": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2, no window": ("Qwen2ForCausalLM", {"use_sliding_window": False}),
    "phi3, longrope": (
        "Phi3ForCausalLM",
        _scaled("longrope", **_LONG) | {"original_max_position_embeddings": 32},
    ),
    "phimoe, longrope": (
        "PhimoeForCausalLM",
        _scaled("longrope", short_mscale=1.1, long_mscale=1.3, **_LONG),
    ),
    "cohere, qk norm": ("CohereForCausalLM", {"use_qk_norm": True}),
    "phi, qk norm": ("PhiForCausalLM", {"qk_layernorm": True}),
    "glm4_moe, qk norm": ("Glm4MoeForCausalLM", {"use_qk_norm": True}),
    "olmo, clipped": ("OlmoForCausalLM", {"clip_qkv": 1.0}),
    "gpt2, scale by layer": ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt_bigcode, many heads": ("GPTBigCodeForCausalLM", {"multi_query": False}),
    "gpt_neox, sequential": ("GPTNeoXForCausalLM", {"use_parallel_residual": False}),
    "opt, norm last": (
        "OPTForCausalLM",
        {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
    ),
    "deepseek_v2, whole queries": ("DeepseekV2ForCausalLM", _LATENT | {"q_lora_rank": None}),
    "deepseek_v3, yarn": (
        "DeepseekV3ForCausalLM",
        _LATENT | _scaled("yarn", mscale=1.0, mscale_all_dim=0.7),
    ),
    "ministral3, scaled queries": (
        "Ministral3ForCausalLM",
        _scaled("yarn", llama_4_scaling_beta=0.3),
    ),
    "mistral4, scaled queries": (
        "Mistral4ForCausalLM",
        _LATENT | _scaled("yarn", llama_4_scaling_beta=0.3),
    ),
    "gemma4, experts": (
        "Gemma4ForCausalLM",
        _MIXED | {"enable_moe_block": True, "attention_k_eq_v": True, "num_kv_shared_layers": 0},
    ),
    "gemma4, wide": ("Gemma4ForCausalLM", _MIXED | {"use_double_wide_mlp": True}),
    "smollm3, no window": ("SmolLM3ForCausalLM", {"use_sliding_window": False}),
}


@cache
def causal_classes() -> dict[str, type[PreTrainedModel]]:
    """Return every causal language model class of transformers by name."""
    models = Path(transformers.__file__).parent / "models"
    names: dict[str, str] = {}
    for file in models.glob("*/modeling_*.py"):
        found = re.findall(r"^class (\w+)\(", file.read_text(), re.MULTILINE)
        names |= {name: f"transformers.models.{file.parent.name}.{file.stem}" for name in found}
    mapped = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    wanted = sorted(name for name in names if name.endswith("ForCausalLM") or name in mapped)
    classes = {name: getattr(importlib.import_module(names[name]), name) for name in wanted}
    return {name: found for name, found in classes.items() if issubclass(found, PreTrainedModel)}


def is_composite(config_class: type[PreTrainedConfig]) -> bool:
    return bool({"text_config", "vision_config", "audio_config"} & set(config_class.sub_configs))


def tiny_config(name: str, **overrides: Any) -> PreTrainedConfig:
    """Return the config of a tiny model of class `name`.

    Composite ones keep their sizes: they are refused, never built.
    """
    config_class = causal_classes()[name].config_class
    overrides = OVERRIDES.get(name, {}) | overrides
    if is_composite(config_class):
        return config_class(**overrides)
    if config_class.model_type in tiny_mixers.RECURRENT:
        return tiny_mixers.tiny_config(config_class.model_type, **overrides)
    known = _fields(config_class)
    sizes = {field: value for field, value in _SIZES.items() if field in known}
    return config_class(**(sizes | overrides))


def variant_config(name: str) -> PreTrainedConfig:
    """Return the config of a variant (a key of VARIANTS) or of a class."""
    found, overrides = VARIANTS.get(name, (name, {}))
    return tiny_config(found, **overrides)


def class_of(name: str) -> type[PreTrainedModel]:
    return causal_classes()[VARIANTS.get(name, (name, {}))[0]]


def _fields(config_class: type[PreTrainedConfig]) -> set[str]:
    names = set(config_class.__dataclass_fields__)
    for base in config_class.__mro__:
        if "__init__" in vars(base):
            names |= set(inspect.signature(base.__init__).parameters)  # type: ignore[misc]
    return names


def random_model(name: str, *, seed: int = 0) -> PreTrainedModel:
    """Return a tiny model with random float32 weights, spread so that greedy answers vary."""
    config = variant_config(name)
    config.architectures = [class_of(name).__name__]
    if config.model_type in tiny_mixers.RECURRENT:
        return tiny_mixers.tiny_model(config.model_type, **OVERRIDES.get(name, {}))
    torch.manual_seed(seed)
    model = class_of(name)(config).float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=_spread(config, parameter_name))
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def _spread(config: PreTrainedConfig, parameter: str) -> float:
    """Spread weights widely, but less in families whose scaled embeddings would drown attention."""
    if "embed" not in parameter:
        return 0.15
    return 0.06 if config.model_type.startswith(_SCALES_EMBEDDINGS) else 0.5


def write_checkpoint(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write the model of `random_model` as a folder with weights and config, without tokenizer."""
    random_model(name, seed=seed).save_pretrained(folder)
    return folder
