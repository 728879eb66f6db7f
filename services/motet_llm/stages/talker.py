"""Load the talker of an omni model: a decoder over codes, fed with a thinker's hidden states.

Its input is the sum of a code's embedding and a thinker's state, in the width of the thinker, which
a projection brings to its own.
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from motet_llm.models.language_model import LanguageModel
from motet_shared.errors import ConfigError

_CLASSES = {"qwen2_5_omni_talker": "Qwen2_5OmniTalkerForConditionalGeneration"}


class Talker(LanguageModel):
    """Join projection, decoder and head of a talker."""

    def __init__(self, config: PreTrainedConfig, decoder: PreTrainedModel, whole: Any):
        super().__init__(config, decoder, whole.codec_head)
        self.projection: nn.Linear = whole.thinker_to_talker_proj

    def forward(
        self,
        *,
        logits_to_keep: Tensor,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **inputs: Any,
    ) -> CausalLMOutput:
        """Return the logits of the tokens that `logits_to_keep` selects."""
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        projected = self.projection(inputs_embeds)
        return super().forward(logits_to_keep=logits_to_keep, inputs_embeds=projected, **inputs)


def talker_class(config: PreTrainedConfig) -> Any:
    """Return transformers' class of a talker, which reads only the talker of a whole checkpoint.

    Raises ConfigError for a config of another model.
    """
    name = _CLASSES.get(config.model_type)
    if name is None:
        raise ConfigError(
            f"stage='talker': model_type {config.model_type!r} has none that is known here; give one"
            f" of {', '.join(sorted(_CLASSES))}, or stage=thinker",
            param="stage",
        )
    found = getattr(transformers, name)
    members = {
        "_keys_to_ignore_on_load_unexpected": [r"^thinker\.", r"^token2wav\."],
        "__module__": found.__module__,
    }
    return type(found.__name__, (found,), members)


def is_talker(config: PreTrainedConfig) -> bool:
    """Return True for the config of a talker."""
    return config.model_type in _CLASSES


def talker_of(whole: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """Return the talker as a causal language model over codes, of a loaded `talker_class`."""
    model = Talker(config, whole.model, whole).eval()
    model.generation_config = whole.generation_config
    return model


def end_codes(config: PreTrainedConfig) -> frozenset[int]:
    """Return the codes at which a talker ends."""
    return frozenset((config.tts_codec_end_token_id, config.tts_codec_pad_token_id))
