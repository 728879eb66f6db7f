"""Compute the further codes of frames whose first code is drawn: a small decoder over each frame.

It reads the talker's last hidden state and the first code, and draws one code after the other, each
from a head of its own. (`Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration`)

Shapes: B frames, K further codes of a frame, N tokens, D width, V codes of a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from motet_kernels.sampling import sampling
from motet_kernels.sampling.choice import Choice
from motet_shared.messages import Sampling

NO_CODE = -1  # in place of a code that is not there
_TOP_K, _TOP_P = 50, 0.8  # transformers' own, with which a talker that draws has codes drawn


class CodePredictor:
    """Draw the further codes of frames, and embed them.

    groups: number of further codes.
    """

    def __init__(self, model: Any):
        self._model = model
        self.groups = len(model.lm_head)
        self._tables: list[nn.Embedding] = list(model.get_input_embeddings())

    def parameters(self) -> Iterator[Tensor]:
        """Yield the predictor's weights."""
        yield from self._model.parameters()

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move to where the talker computes."""
        self._model.to(device=device, dtype=dtype)

    def embedded(self, codes_NK: Tensor) -> Tensor:
        """Return the sums `[N, D]` of the embeddings of codes; zeros for tokens without."""
        has_N1 = (codes_NK[:, :1] != NO_CODE).to(self._tables[0].weight.dtype)
        known_NK = codes_NK.clamp(min=0)
        parts = [table(known_NK[:, k]) for k, table in enumerate(self._tables)]
        return torch.stack(parts).sum(0) * has_N1

    @torch.inference_mode()
    def draw(
        self, hidden_BD: Tensor, first_BD: Tensor, settings: Sequence[tuple[Sampling, int]]
    ) -> Tensor:
        """Return the further codes `[B, K]` of frames.

        hidden_BD: last hidden states that the first codes were drawn from. first_BD: embeddings of
        these codes. settings: by frame, sampling and number of the frame: noise depends on seed,
        frame and group.
        """
        cache = DynamicCache(config=self._model.config)
        dtype = self._tables[0].weight.dtype
        inputs_BND = torch.stack((hidden_BD, first_BD), dim=1).to(dtype)
        drawn: list[Tensor] = []
        for group, (head, table) in enumerate(zip(self._model.lm_head, self._tables, strict=True)):
            output = self._model.model(
                inputs_embeds=inputs_BND, past_key_values=cache, use_cache=True
            )
            logits_BV = head(output.last_hidden_state[:, -1]).float()
            choices = [_choice(one, frame * self.groups + group) for one, frame in settings]
            drawn.append(sampling.draw(logits_BV, choices, None))
            inputs_BND = table(drawn[-1].clamp(min=0)).unsqueeze(1)  # -1 where nothing is finite
        return torch.stack(drawn, dim=1)


def _choice(one: Sampling, position: int) -> Choice:
    """Return how a code is drawn: as the talker's, the likeliest one if that is."""
    return Choice(1.0 if one.temperature > 0 else 0.0, _TOP_K, _TOP_P, 0.0, one.seed, position)
