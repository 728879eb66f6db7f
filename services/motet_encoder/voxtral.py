"""Encode sound for Voxtral, in stretches of thirty seconds.

transformers' processor for it needs mistral-common; its feature extractor does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .sounds import Sounds

_STRETCH = 30  # seconds
_HALVED = 2  # frames per position of the tower


class Voxtral(Sounds):
    """Encode with a fixed number of tokens per stretch. The processor is the feature extractor."""

    @property
    def _extractor(self) -> Any:
        return self.processor

    def _processed(self, samples: NDArray[np.float32]) -> dict[str, Tensor]:
        rate = self.sampling_rate
        features_1FN = self.processor(
            samples,
            sampling_rate=rate,
            padding=True,
            truncation=False,
            pad_to_multiple_of=_STRETCH * rate,
            return_tensors="pt",
        )["input_features"]
        audio = self.model.config.audio_config
        frames = audio.max_source_positions * _HALVED
        features_BFN = torch.cat(features_1FN.split(frames, dim=-1))
        merged = audio.intermediate_size // audio.hidden_size  # positions per token
        tokens = len(features_BFN) * audio.max_source_positions // merged
        return {
            "input_features": features_BFN,
            "input_ids": torch.full((1, tokens), self.placeholder),
        }
