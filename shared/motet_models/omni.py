"""Find the stages of an omni model in its config.json: a thinker, a talker, and code2wav.

The thinker is a language model that sees and hears. The talker is one whose tokens are codes of
sound; it goes on from the thinker's hidden states. All three lie in one checkpoint folder, each
under a prefix of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Stage = Literal["thinker", "talker"]
STAGES: tuple[Stage, ...] = ("thinker", "talker")
# Families whose thinker's tokens and talker's codes are compared with `generate` of transformers.
OMNI_TYPES = frozenset(["qwen2_5_omni", "qwen3_omni_moe"])
TALKER_SUFFIX = "-talker"  # what decode calls the talker of a model, behind the model's name


def is_omni(config: Mapping[str, Any]) -> bool:
    """Return True for the config.json of a checkpoint that consists of stages."""
    return config.get("model_type") in OMNI_TYPES


def speaks(config: Mapping[str, Any]) -> bool:
    """Return True if the checkpoint has a talker and code2wav."""
    return is_omni(config) and config.get("enable_audio_output", True) is not False


def stage_config(config: Mapping[str, Any], stage: Stage = "thinker") -> Mapping[str, Any]:
    """Return the config of a stage; that of a checkpoint without stages unchanged."""
    found = config.get(f"{stage}_config") if is_omni(config) else None
    return found if isinstance(found, Mapping) else config


def stage_tensors(stage: Stage) -> tuple[str, ...]:
    """Return the prefixes of the tensors of a stage in a whole checkpoint, without towers."""
    return ("thinker.model.", "thinker.lm_head.") if stage == "thinker" else ("talker.",)


def talker_layer(config: Mapping[str, Any]) -> int | None:
    """Return the layer of the thinker whose output of media the talker reads; None: the last state.

    The first layer is 1.
    """
    found = stage_config(config, "talker").get("accept_hidden_layer") if speaks(config) else None
    return found if isinstance(found, int) else None


def talker_name(model: str) -> str:
    """Return the name under which decode serves the talker of a model."""
    return model + TALKER_SUFFIX
