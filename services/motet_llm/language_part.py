"""The language model of a checkpoint that also sees: its decoder and its head, and nothing of its eyes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from motet_shared.seeing import MODEL_TYPES, placeholder

# Old and new names of what is the language model's, and the names that it has when it stands alone.
RENAMED = {
    r"^language_model\.lm_head": "lm_head",
    r"^language_model\.model": "model",
    r"^model\.language_model": "model",
    r"^model\.text_model": "model",
}
# Parts of a checkpoint that `motet_vision` loads.
_EYES = r"^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|connector)\."


@dataclass(frozen=True, kw_only=True)
class SightShape:
    """What the language model takes for a picture: at the tokens `placeholder`, `layers` tensors of width `hidden`.

    The first layer's are embeddings, those of layer n are added to what decoder layer n - 1 gives. `axes`: of its
    positions, 3 if they count frames, rows and columns.
    """

    placeholder: int
    hidden: int
    layers: int = 1
    axes: int = 1


def sees(config: PreTrainedConfig) -> bool:
    return config.model_type in MODEL_TYPES


def sight_shape(config: PreTrainedConfig) -> SightShape | None:
    """Of the config of a whole checkpoint; None if it sees nothing."""
    token = placeholder(config.to_dict()) if sees(config) else None
    if token is None:
        return None
    text = config.get_text_config()
    deeper = getattr(config.vision_config, "deepstack_visual_indexes", None) or ()
    has_axes = "mrope_section" in (getattr(text, "rope_parameters", None) or {})
    return SightShape(placeholder=token, hidden=text.hidden_size, layers=1 + len(deeper), axes=3 if has_axes else 1)


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The language model's own config, with what the checkpoint says outside of it."""
    text: PreTrainedConfig = copy.deepcopy(config.get_text_config())
    text.tie_word_embeddings = bool(config.tie_word_embeddings)
    if text.dtype is None:
        text.dtype = config.dtype
    return text


def without_eyes(found: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A class of language models that does not miss a place for the checkpoint's eyes."""
    members = {"_keys_to_ignore_on_load_unexpected": [_EYES], "__module__": found.__module__}
    return type(found.__name__, (found,), members)


class LanguageModel(PreTrainedModel):
    """A decoder with a head, for the families of which transformers has no language model without eyes."""

    config_class = PreTrainedConfig
    base_model_prefix = "model"
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.model = AutoModel.from_config(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, *, logits_to_keep: Tensor, **inputs: Any) -> CausalLMOutput:
        """Logits of the tokens that `logits_to_keep` names."""
        hidden_1NX = self.model(**inputs).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden_1NX[:, logits_to_keep]))
