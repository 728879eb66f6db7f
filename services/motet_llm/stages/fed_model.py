"""Define the interface between the engine and a model that goes on from another's states.

Shapes: N tokens of a step, W numbers of a state, X width of the decoder's input.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from motet_kernels.spans import upload
from motet_llm.models.language_model import LanguageModel

from .code_predictor import CodePredictor
from .states import StepStates


class FedModel(LanguageModel):
    """Join a decoder and a head whose inputs are embeddings and states.

    state_width: numbers of a state. predictor: computes the further codes of a frame; None: a frame
    has one.
    """

    state_width: int
    predictor: CodePredictor | None = None

    def inputs_of(self, embeddings_NX: Tensor, given: StepStates) -> Tensor:
        """Return the decoder's inputs `[N, X]`: states, with the embeddings of tokens that have one."""
        states_NX, keeps_N = (
            upload(part, embeddings_NX.device) for part in (given.states_NW, given.keeps_N)
        )
        return embeddings_NX * keeps_N.unsqueeze(1) + states_NX.to(embeddings_NX.dtype)

    def projected(self, inputs_1NX: Tensor) -> Tensor:
        """Return inputs in the width of the decoder."""
        return inputs_1NX

    def forward(
        self,
        *,
        logits_to_keep: Tensor,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **inputs: Any,
    ) -> CausalLMOutput:
        """Return the logits of the tokens that `logits_to_keep` selects."""
        if inputs_embeds is None:  # a decoder itself may take no ids
            inputs_embeds = self.get_input_embeddings()(input_ids)
        projected = self.projected(inputs_embeds)
        return super().forward(logits_to_keep=logits_to_keep, inputs_embeds=projected, **inputs)
