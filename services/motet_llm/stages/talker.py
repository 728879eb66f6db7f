"""Load the talker of an omni model: a decoder over codes, fed with a thinker's hidden states.

What a family does with a state is its own: Qwen2.5-Omni's talker adds it to a code's embedding and
projects the sum, Qwen3-Omni's (`qwen3_talker.py`) projects it before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig

from motet_shared.errors import ConfigError

from . import qwen3_talker
from .fed_model import FedModel


class Talker(FedModel):
    """Join projection, decoder and head of Qwen2.5-Omni's talker."""

    def __init__(self, config: PreTrainedConfig, whole: Any):
        super().__init__(config, whole.model, whole.codec_head)
        self.projection: nn.Linear = whole.thinker_to_talker_proj
        self.state_width = int(config.embedding_size)

    def projected(self, inputs_1NX: Tensor) -> Tensor:
        projected: Tensor = self.projection(inputs_1NX)
        return projected


@dataclass(frozen=True, slots=True)
class _Family:
    """Describe how a family's talker is loaded.

    reader: returns the class of transformers that reads it from a whole checkpoint. prefix: of its
    tensors there, to be cut off. whole_config: what that class takes is the whole checkpoint's
    config. made: the model for the engine, of a config from `talker_config` and what was loaded.
    ends: fields of the config with the codes at which speech ends.
    """

    reader: Callable[[], Any]
    made: Callable[[PreTrainedConfig, Any], FedModel]
    ends: tuple[str, ...]
    prefix: str | None = None
    whole_config: bool = False


def _qwen2_5_reader() -> Any:
    found = transformers.Qwen2_5OmniTalkerForConditionalGeneration
    members = {
        "_keys_to_ignore_on_load_unexpected": [r"^thinker\.", r"^token2wav\."],
        "__module__": found.__module__,
    }
    return type(found.__name__, (found,), members)


# By `model_type` of a talker's decoder.
_FAMILIES: dict[str, _Family] = {
    "qwen2_5_omni_talker": _Family(
        _qwen2_5_reader,
        Talker,
        ("tts_codec_end_token_id", "tts_codec_pad_token_id"),
        prefix=r"^talker\.",
    ),
    qwen3_talker.MODEL_TYPE: _Family(
        qwen3_talker.reader, qwen3_talker.Qwen3Talker, ("eos_token_id",), whole_config=True
    ),
}


def is_talker(config: PreTrainedConfig) -> bool:
    """Return True for the config of a talker's decoder."""
    return config.model_type in _FAMILIES


def talker_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of a talker's decoder, of the talker's. Raises ConfigError for others."""
    text = qwen3_talker.text_config(config) if hasattr(config, "text_config") else config
    if not is_talker(text):
        raise ConfigError(
            f"stage='talker': model_type {text.model_type!r} has none that is known here; give one"
            f" of {', '.join(sorted(_FAMILIES))}, or stage=thinker",
            param="stage",
        )
    return text


def reader_of(config: PreTrainedConfig) -> tuple[Any, dict[str, str] | None, bool]:
    """Return how the talker of a whole checkpoint is read, of a config from `talker_config`.

    That is a class of transformers, what it cuts off names of tensors, and whether it takes the
    config of the whole checkpoint.
    """
    family = _FAMILIES[config.model_type]
    mapping = None if family.prefix is None else {family.prefix: ""}
    return family.reader(), mapping, family.whole_config


def talker_of(whole: Any, config: PreTrainedConfig) -> FedModel:
    """Return the talker as a causal language model over codes, of what the reader loaded."""
    model = _FAMILIES[config.model_type].made(config, whole)
    model.eval()
    model.generation_config = whole.generation_config
    return model


def end_codes(config: PreTrainedConfig) -> frozenset[int]:
    """Return the codes at which a talker ends."""
    return frozenset(getattr(config, name) for name in _FAMILIES[config.model_type].ends)
