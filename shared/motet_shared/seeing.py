"""Which checkpoints see, from their config.json alone: language model, eyes and command line agree on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Families whose pictures are encoded apart and put in the places of single tokens, under plain causal attention.
MODEL_TYPES = frozenset({"idefics3", "llava", "qwen2_5_vl", "qwen3_vl", "smolvlm"})


def sees(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint with these contents of config.json takes pictures, and is served with them."""
    return config.get("model_type") in MODEL_TYPES and placeholder(config) is not None


def placeholder(config: Mapping[str, Any]) -> int | None:
    """The token id in whose places the embeddings of a picture are put; None: there is none."""
    found = config.get("image_token_id", config.get("image_token_index"))
    return found if isinstance(found, int) else None
