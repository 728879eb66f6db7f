"""Tell which classes of transformers see and hear here beside text, and why the others do not."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from motet_encoder.processors import processor_class
from motet_models.image_support import HEARING_TYPES, MODEL_TYPES
from motet_models.omni import OMNI_TYPES
from support.families import composites

# What a comparison with `generate` found, where the rules below find nothing.
FOUND = {
    "aya_vision": "its head scales no logits, which its language model alone does",
    "gemma4": "its layers read the ids of tokens too (embeddings by layer)",
    "gemma3n": "its tower needs timm",
    "lighton_ocr": "its tensors are named by rules that only its whole class knows",
    "llava_onevision": "the tokens of a picture depend on how many pictures a chat has",
    "llama4": "its class projects pictures outside of `get_image_features`",
}
# The same of sound.
FOUND_OF_SOUND = {
    "gemma3n": "its layers read the ids of tokens too (embeddings by layer)",
    "gemma4": "its layers read the ids of tokens too (embeddings by layer)",
    "phi4_multimodal": "its language model has an adapter of its own for sound (`speech-lora`)",
    "voxtral_realtime": "its sound is added to the embeddings of text, token by token",
}


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield `model_type`, class and outcome of every class, in order."""
    found = {
        config.model_type: (config, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config])
        for config in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    }
    for name in sorted(found):
        config, model = found[name]
        yield (
            name,
            model.__name__,
            "exact" if name in MODEL_TYPES | OMNI_TYPES else _cause(name, config),
        )


def sound_rows() -> Iterator[tuple[str, str, str]]:
    """Yield `model_type`, class and outcome of every class that takes sound beside text, in order."""
    for name, (config, model) in sorted(composites.composite_classes().items()):
        if {"audio", "text"} <= set(getattr(model, "input_modalities", ())):
            yield (
                name,
                model.__name__,
                "exact" if name in HEARING_TYPES | OMNI_TYPES else _deaf(name, config),
            )


def _deaf(name: str, config_class: type) -> str:
    """Return why a class is refused with sound."""
    if name in FOUND_OF_SOUND:
        return FOUND_OF_SOUND[name]
    if "thinker_config" in getattr(config_class, "sub_configs", {}):
        return "its language model is within its `thinker_config`, beside a talker"
    if config_class not in PROCESSOR_MAPPING:
        return "transformers has no processor for it"
    return "not compared with `generate`"


def _cause(name: str, config_class: type) -> str:
    """Return why a class is refused with pictures."""
    if name in FOUND:
        return FOUND[name]
    config = config_class()
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    model = MODEL_MAPPING.get(config_class, None)
    if not hasattr(model, "get_image_features"):
        return "its class does not encode pictures apart from text"
    parameters = inspect.signature(model.forward).parameters
    if "cross_attention_states" in parameters or "cross_attention_mask" in parameters:
        return "its layers attend to pictures beside the text (cross-attention)"
    if config_class not in IMAGE_PROCESSOR_MAPPING:
        return "transformers has no image processor for it"
    kinds = IMAGE_PROCESSOR_MAPPING[config_class]
    kinds = kinds.values() if isinstance(kinds, dict) else kinds
    if not any(kind and not getattr(kind, "is_dummy", False) for kind in kinds):
        return "its image processor needs torchvision"
    if processor_class(config) is None:
        return "transformers has no processor for it"
    return "not compared with `generate`"
