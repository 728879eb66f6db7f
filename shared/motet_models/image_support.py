"""Determine from config.json whether a checkpoint accepts images or sound.

The language model, the encoder service and the command line share this decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from .omni import stage_config

Sense = Literal["image", "audio"]

# Families whose images are encoded separately and replace single placeholder tokens; each is compared
# with `generate` of transformers.
MODEL_TYPES = frozenset(
    """gemma3 glm4v idefics3 internvl llava llava_next mistral3 qwen2_5_omni_thinker
    qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe smolvlm
    vipllava""".split()
)

# Families that hear, likewise.
HEARING_TYPES = frozenset(
    """glmasr granite_speech qwen2_5_omni_thinker qwen2_audio qwen3_omni_moe_thinker
    voxtral""".split()
)

_TYPES: dict[Sense, frozenset[str]] = {"image": MODEL_TYPES, "audio": HEARING_TYPES}
# Fields of config.json with the token that templates write for an image, if not the placeholder.
_MARKS = {"gemma3": "boi_token_index"}


def accepts_images(config: Mapping[str, Any]) -> bool:
    """Return True if the checkpoint with this config.json accepts and is served with images."""
    return "image" in placeholders(config)


def accepts_audio(config: Mapping[str, Any]) -> bool:
    """Return True if the checkpoint with this config.json accepts and is served with sound.

    One that switches to an adapter of its own where there is sound (Granite Speech) is not.
    """
    name = config.get("model_type")
    if config.get("has_lora_adapter", name == "granite_speech"):
        return False
    return "audio" in placeholders(config)


def has_encoder(config: Mapping[str, Any]) -> bool:
    """Return True if an encoder service encodes what chats with the checkpoint contain."""
    return accepts_images(config) or accepts_audio(config)


def placeholders(config: Mapping[str, Any]) -> dict[Sense, int]:
    """Return the ids of the tokens that embeddings of images and of sound replace.

    Only of the senses that the family is compared with `generate` in.
    """
    config = stage_config(config)
    found: dict[Sense, int] = {}
    for sense, types in _TYPES.items():
        token = config.get(f"{sense}_token_id", config.get(f"{sense}_token_index"))
        if config.get("model_type") in types and isinstance(token, int):
            found[sense] = token
    return found


def marks(config: Mapping[str, Any]) -> dict[Sense, int]:
    """Return the ids of the tokens that chat templates write for an image and for a recording.

    They are the placeholders, except where a token of its own begins an image (Gemma 3).
    """
    config = stage_config(config)
    found = config.get(_MARKS.get(str(config.get("model_type")), ""))
    own: dict[Sense, int] = {"image": found} if isinstance(found, int) else {}
    return placeholders(config) | own
