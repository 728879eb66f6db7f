"""A codec's decoder as a stream: frames in, samples out, in chunks of any size, without a click between them.

What a decoder must remember of a sequence is its `State`; those of several sequences are decoded as one batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from motet_kernels.device import Download

State = Any  # a codec's own; nobody else looks inside


class Codec(ABC):
    """Decodes frames of a codec language model.

    sample_rate: Hz. frame_samples: samples per frame, so frames per second are `sample_rate / frame_samples`.
    """

    sample_rate: int
    frame_samples: int

    @abstractmethod
    def begin(self) -> State:
        """The state before the first frame of a sequence."""

    @abstractmethod
    def decode(self, states: list[State], frames_BN: Tensor) -> list[Tensor]:
        """The samples, float32 `[N * frame_samples]` per sequence, of the next N frames of each; N ≥ 1.

        They are where it computes.
        A decoder that needs a look ahead gives back fewer samples here and the others in `finish`.
        """

    def finish(self, state: State) -> Tensor | None:
        """The samples that are still due after the last frame, if any."""
        return None


def on_host(chunks: list[Tensor]) -> list[Tensor]:
    """Samples on the CPU, all in one copy."""
    if not any(chunk.is_cuda for chunk in chunks):
        return chunks
    return list(Download(torch.cat(chunks)).wait().split([len(chunk) for chunk in chunks]))
