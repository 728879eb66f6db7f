"""Build tiny random models of every composite class of transformers: a language model and towers.

The language model is shrunk as in `families`; the towers of pictures and sound get sizes of their
own, since these tests give them nothing to encode.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from motet_llm.weights import composite
from support.checkpoints import tiny_mixers
from support.families import language_families as families

_TOWER: dict[str, Any] = {}
for _value, _names in (
    (32, "hidden_size embed_dim d_model intermediate_size encoder_ffn_dim ffn_dim out_dim"),
    (2, "num_hidden_layers depth num_attention_heads num_heads encoder_layers num_layers"),
    (2, "encoder_attention_heads attention_heads num_key_value_heads num_blocks"),
    (32, "nemo_conv_channels ext_pw_out_channel depthwise_separable_out_channel"),
    (28, "image_size crop_size"),
    (14, "patch_size"),
    (64, "out_hidden_size projection_dim output_dim vision_output_dim"),
):
    _TOWER |= dict.fromkeys(_names.split(), _value)

_SECTIONS = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
    }
}
# What the language models of these families need besides the sizes, by `model_type`.
TEXT: dict[str, dict[str, Any]] = {
    # Its composite class does not cap logits, and its checkpoints ask for none.
    "gemma3": families.OVERRIDES["Gemma3ForCausalLM"] | {"final_logit_softcapping": None},
    "gemma3n": families.OVERRIDES["Gemma3nForCausalLM"],
    "gemma4": families.OVERRIDES["Gemma4ForCausalLM"],
    "glm4v": _SECTIONS,
    "qwen2_vl": _SECTIONS,
    "qwen3_vl_moe": _SECTIONS,
}
# Families that are served as text, and some that are refused.
SERVED = """gemma3 gemma3n gemma4 glm4v internvl llama4 llava_next llava_onevision mistral3
    phi4_multimodal qwen2_vl qwen3_5 qwen3_vl_moe""".split()
REFUSED = ["florence2"]


def tiny_config(
    config_class: type[PreTrainedConfig],
    text_overrides: dict[str, Any] | None = None,
    *,
    tower: dict[str, Any] | None = None,
    audio: dict[str, Any] | None = None,
    outer: dict[str, Any] | None = None,
) -> PreTrainedConfig:
    """Return a composite config with a tiny language model and small towers.

    tower, audio, outer: further fields of the configs of the towers of pictures and of sound, and
        of the composite's own.
    """
    further = {"vision_config": tower or {}, "audio_config": audio or {}}
    default = config_class()
    parts: dict[str, Any] = {}
    if default.get_text_config() is default:
        parts = _tiny_text(config_class, text_overrides or {})
        del parts["model_type"]
    for name in config_class.sub_configs:
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig):
            parts[name] = (
                _tiny_text(type(part), text_overrides or {})
                if part is default.get_text_config()
                else _shrunk(part, _TOWER) | further.get(name, {})
            )
    return config_class(**(parts | (outer or {})))


def random_model(name: str, *, seed: int = 0) -> PreTrainedModel:
    """Return a tiny composite model with random float32 weights, spread so that answers vary."""
    config_class, model_class = composite_classes()[name]
    config = tiny_config(config_class, TEXT.get(name, {}))
    config.architectures = [model_class.__name__]
    return random_weights(config, seed=seed)


def random_weights(config: PreTrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """Return the composite model of a config with random float32 weights."""
    _, model_class = composite_classes()[config.model_type]
    torch.manual_seed(seed)
    model = without_missing_towers(model_class, config).float()
    text = config.get_text_config()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=families._spread(text, parameter_name))
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def without_missing_towers(
    model_class: type[PreTrainedModel], config: PreTrainedConfig
) -> PreTrainedModel:
    """Return a model, without the towers whose library is not installed (Gemma 3n's timm)."""
    with composite.optional_towers():
        return model_class(config)


def _tiny_text(config_class: type[PreTrainedConfig], overrides: dict[str, Any]) -> dict[str, Any]:
    if config_class.model_type in tiny_mixers.RECURRENT:
        return tiny_mixers.tiny_config(config_class.model_type, **overrides).to_dict()
    known = families._fields(config_class)
    sizes = {name: value for name, value in families._SIZES.items() if name in known}
    return {"model_type": config_class.model_type, **sizes, **overrides}


def _shrunk(part: PreTrainedConfig, sizes: dict[str, Any]) -> dict[str, Any]:
    known = families._fields(type(part))
    return {"model_type": part.model_type} | {k: v for k, v in sizes.items() if k in known}


def composite_classes() -> dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]]:
    """Return the config class and the generating class of each composite `model_type`."""
    return {
        config.model_type: (config, mapping[config])
        for mapping in (MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
        for config in mapping
    }
