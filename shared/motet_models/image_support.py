"""Determine from config.json whether a checkpoint accepts images or sound.

The language model, the encoder service and the command line share this decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Families whose images are encoded separately and replace single placeholder tokens; each is compared
# with `generate` of transformers.
MODEL_TYPES = frozenset(
    """gemma3 glm4v idefics3 internvl llava llava_next mistral3
    qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm vipllava""".split()
)

# Families that hear, likewise.
HEARING_TYPES = frozenset("glmasr granite_speech qwen2_5_omni_thinker qwen2_audio voxtral".split())

# Fields of config.json with the token that templates write for an image, if not the placeholder.
_MARKS = {"gemma3": "boi_token_index"}


def accepts_images(config: Mapping[str, Any]) -> bool:
    """Return True if the checkpoint with this config.json accepts and is served with images."""
    return config.get("model_type") in MODEL_TYPES and placeholder(config) is not None


def accepts_audio(config: Mapping[str, Any]) -> bool:
    """Return True if the checkpoint with this config.json accepts and is served with sound.

    One that switches to an adapter of its own where there is sound (Granite Speech) is not.
    """
    name = config.get("model_type")
    if config.get("has_lora_adapter", name == "granite_speech"):
        return False
    return name in HEARING_TYPES and placeholder(config) is not None


def has_encoder(config: Mapping[str, Any]) -> bool:
    """Return True if an encoder service encodes what chats with the checkpoint contain."""
    return accepts_images(config) or accepts_audio(config)


def placeholder(config: Mapping[str, Any]) -> int | None:
    """Return the id of the token that embeddings replace; None if there is none.

    They are of sound for a family that hears, else of images.
    """
    sense = "audio" if config.get("model_type") in HEARING_TYPES else "image"
    found = config.get(f"{sense}_token_id", config.get(f"{sense}_token_index"))
    return found if isinstance(found, int) else None


def mark(config: Mapping[str, Any]) -> int | None:
    """Return the id of the token that chat templates write for an image or a recording.

    It is the placeholder, except where a token of its own begins an image (Gemma 3).
    """
    found = config.get(_MARKS.get(str(config.get("model_type")), ""))
    return found if isinstance(found, int) else placeholder(config)
