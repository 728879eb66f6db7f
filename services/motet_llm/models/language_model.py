"""Load the language model of a multimodal checkpoint: decoder and head, no vision parts."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from motet_models.image_support import MODEL_TYPES, placeholder

# Old and new names of the language model's parts, and the names in a text-only checkpoint.
RENAMED = {
    r"^language_model\.lm_head": "lm_head",
    r"^language_model\.model": "model",
    r"^model\.language_model": "model",
    r"^model\.text_model": "model",
}
# Parts of a checkpoint that `motet_vision` loads.
_VISION_PARTS = r"^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|connector)\."


@dataclass(frozen=True, kw_only=True)
class ImageEmbeddingShape:
    """Describe image embeddings: at tokens `placeholder`, `layers` tensors of width `hidden`.

    The first one is the input embedding; that of index n is added to the output of decoder layer
    n - 1.
    axes: axes of positions, 3 if they count frames, rows and columns.
    """

    placeholder: int
    hidden: int
    layers: int = 1
    axes: int = 1


def reads_images(config: PreTrainedConfig) -> bool:
    return config.model_type in MODEL_TYPES


def image_embedding_shape(config: PreTrainedConfig) -> ImageEmbeddingShape | None:
    """Return the shape from a whole checkpoint's config; None if it reads no images."""
    token = placeholder(config.to_dict()) if reads_images(config) else None
    if token is None:
        return None
    text = config.get_text_config()
    deeper = getattr(config.vision_config, "deepstack_visual_indexes", None) or ()
    has_axes = "mrope_section" in (getattr(text, "rope_parameters", None) or {})
    return ImageEmbeddingShape(
        placeholder=token,
        hidden=text.hidden_size,
        layers=1 + len(deeper),
        axes=3 if has_axes else 1,
    )


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the language model's own config, completed from the checkpoint's outer config."""
    text: PreTrainedConfig = copy.deepcopy(config.get_text_config())
    text.tie_word_embeddings = bool(config.tie_word_embeddings)
    if text.dtype is None:
        text.dtype = config.dtype
    return text


def without_vision(found: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass that ignores the checkpoint's vision weights when it is loaded."""
    members = {
        "_keys_to_ignore_on_load_unexpected": [_VISION_PARTS],
        "__module__": found.__module__,
    }
    return type(found.__name__, (found,), members)


class LanguageModel(PreTrainedModel):  # type: ignore[misc]  # transformers has no types
    """Represent a decoder with a head, for families without a text-only model in transformers."""

    config_class = PreTrainedConfig
    base_model_prefix = "model"
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.model = AutoModel.from_config(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, *, logits_to_keep: Tensor, **inputs: Any) -> CausalLMOutput:
        """Return the logits of the tokens that `logits_to_keep` selects."""
        hidden_1NX = self.model(**inputs).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden_1NX[:, logits_to_keep]))
