"""Determine from config.json whether a checkpoint accepts images.

The language model, the vision service and the command line share this decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Families whose images are encoded separately and replace single placeholder tokens, under plain
# causal attention.
MODEL_TYPES = frozenset({"idefics3", "llava", "qwen2_5_vl", "qwen3_vl", "smolvlm"})


def accepts_images(config: Mapping[str, Any]) -> bool:
    """Return True if the checkpoint with this config.json accepts and is served with images."""
    return config.get("model_type") in MODEL_TYPES and placeholder(config) is not None


def placeholder(config: Mapping[str, Any]) -> int | None:
    """Return the id of the token that image embeddings replace; None if there is none."""
    found = config.get("image_token_id", config.get("image_token_index"))
    return found if isinstance(found, int) else None
