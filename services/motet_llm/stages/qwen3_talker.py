"""Load Qwen3-Omni's talker: an MoE decoder over the first codes of frames, and its code predictor.

A state is what the thinker has of a token, and the token's id behind it. One multilayer perceptron
brings the embeddings of text to the width of the decoder, another the hidden states of media. To
that the embeddings of a frame's codes are added, of all groups.

Shapes: N tokens of a step, X width of the thinker, W = X + 1, D width of the decoder, K groups of
codes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, Qwen3OmniMoeForConditionalGeneration

from motet_kernels.spans import upload

from .code_predictor import CodePredictor
from .fed_model import FedModel
from .states import StepStates

MODEL_TYPE = "qwen3_omni_moe_talker_text"
_MEDIA = ("audio_token_id", "image_token_id", "video_token_id")


class Qwen3Talker(FedModel):
    """Join projections, decoder, head and code predictor."""

    def __init__(self, config: PreTrainedConfig, whole: Any):
        talker = whole.talker
        super().__init__(config, talker.model, talker.codec_head)
        outer = talker.config
        self.state_width = int(outer.thinker_hidden_size) + 1
        self._media = torch.tensor([int(getattr(outer, name)) for name in _MEDIA])
        self.text_projection, self.hidden_projection = (
            talker.text_projection,
            talker.hidden_projection,
        )
        # Outside of the module tree: it attends to the codes of a frame, not to the paged cache.
        object.__setattr__(self, "predictor", CodePredictor(talker.code_predictor))

    def inputs_of(self, embeddings_ND: Tensor, given: StepStates) -> Tensor:
        device, dtype = embeddings_ND.device, embeddings_ND.dtype
        media_N = torch.isin(given.states_NW[:, -1].long(), self._media)
        states_NX, keeps_N = (
            upload(part, device) for part in (given.states_NW[:, :-1].to(dtype), given.keeps_N)
        )
        inputs_ND: Tensor = self.text_projection(states_NX)
        if bool(media_N.any()):
            hidden_ND = self.hidden_projection(states_NX)
            inputs_ND = torch.where(upload(media_N, device).unsqueeze(1), hidden_ND, inputs_ND)
        inputs_ND = inputs_ND + embeddings_ND * keeps_N.unsqueeze(1)
        if given.codes_NK is None or self.predictor is None:
            return inputs_ND
        return inputs_ND + self.predictor.embedded(upload(given.codes_NK, device)).to(dtype)


def reader() -> Any:
    """Return transformers' whole class without all but the talker.

    It is the whole class whose rules join the tensors of experts.
    """
    found: Any = Qwen3OmniMoeForConditionalGeneration

    def init(self: Any, config: PreTrainedConfig) -> None:
        found.__init__(self, config)
        del self.thinker, self.code2wav

    members = {
        "__init__": init,
        "get_input_embeddings": lambda self: self.talker.get_input_embeddings(),
        "get_output_embeddings": lambda self: self.talker.codec_head,
        "_keys_to_ignore_on_load_unexpected": [r"^thinker\.", r"^code2wav\."],
        "__module__": found.__module__,
    }
    return type(found.__name__, (found,), members)


def text_config(talker: PreTrainedConfig) -> PreTrainedConfig:
    """Return the decoder's config of a talker's, with the code at which speech ends."""
    config = talker.text_config
    config.eos_token_id = talker.codec_eos_token_id
    return config
