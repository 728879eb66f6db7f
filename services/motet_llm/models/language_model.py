"""Describe the language model of a composite checkpoint: its image embeddings, and its class."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from motet_models.image_support import HEARING_TYPES, MODEL_TYPES, placeholders


@dataclass(frozen=True, kw_only=True)
class ImageEmbeddingShape:
    """Describe image embeddings: at tokens `placeholders`, `layers` tensors of width `hidden`.

    The first one is the input embedding; that of index n is added to the output of decoder layer
    n - 1.
    flat: those of `placeholders` whose tokens have positions like text: sound.
    axes: axes of positions, 3 if they count frames, rows and columns.
    counts_frames: what follows a video has greater positions than its last frame; else, than its
    longer side.
    looks_ahead: the tokens of a picture see each other in both directions.
    window: tokens that the layers with the shortest view see; None: all.
    """

    placeholders: tuple[int, ...]
    hidden: int
    layers: int = 1
    flat: tuple[int, ...] = ()
    axes: int = 1
    counts_frames: bool = False
    looks_ahead: bool = False
    window: int | None = None


def reads_embeddings(config: PreTrainedConfig) -> bool:
    """Return True for a config whose prompts may hold embeddings of pictures or sound."""
    return config.model_type in MODEL_TYPES | HEARING_TYPES


def image_embedding_shape(config: PreTrainedConfig) -> ImageEmbeddingShape | None:
    """Return the shape from a whole checkpoint's config; None if it reads no images."""
    tokens = placeholders(config.to_dict())
    if not tokens:
        return None
    text = config.get_text_config()
    tower = getattr(config, "vision_config", None)
    deeper = getattr(tower, "deepstack_visual_indexes", None) or ()
    model_class: Any = MODEL_MAPPING[type(config)]
    return ImageEmbeddingShape(
        placeholders=tuple(tokens.values()),
        hidden=text.hidden_size,
        layers=1 + len(deeper),
        flat=(tokens["audio"],) if "audio" in tokens else (),
        axes=3 if "image" in tokens and hasattr(model_class, "get_rope_index") else 1,
        counts_frames=hasattr(model_class, "get_llm_pos_ids_for_vision"),
        looks_ahead="token_type_ids" in inspect.signature(model_class.forward).parameters,
        window=getattr(text, "sliding_window", None),
    )


class LanguageModel(PreTrainedModel):  # type: ignore[misc]  # transformers has no types
    """Join a decoder and a head, for families without a text-only class in transformers."""

    config_class = PreTrainedConfig
    base_model_prefix = "model"
    _supports_sdpa = True  # the decoder decides what it supports

    def __init__(self, config: PreTrainedConfig, decoder: PreTrainedModel, head: nn.Module):
        super().__init__(config)
        self.model = decoder
        self.lm_head = head

    def get_input_embeddings(self) -> nn.Module:
        """Return the decoder's table of embeddings."""
        value: nn.Module = self.model.get_input_embeddings()
        return value

    def forward(self, *, logits_to_keep: Tensor, **inputs: Any) -> CausalLMOutput:
        """Return the logits of the tokens that `logits_to_keep` selects."""
        hidden_1NX = self.model(**inputs).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden_1NX[:, logits_to_keep]))
