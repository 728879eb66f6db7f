"""Choose codes from logits by a checkpoint's generation settings, with noise from the caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class CodeSampling:
    """Hold the sampling settings of a checkpoint.

    temperature: 0 is greedy.
    top_k: 0 disables it.
    top_p: 1 disables it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def of(cls, generation: Any, greedy: bool = False) -> CodeSampling:
        """Read the settings of a transformers `GenerationConfig`."""
        if greedy or not getattr(generation, "do_sample", False):
            return cls()

        def setting(name: str, otherwise: float) -> float:
            value = getattr(generation, name, None)
            return otherwise if value is None else float(value)

        return cls(setting("temperature", 1.0), int(setting("top_k", 50)), setting("top_p", 1.0))

    @property
    def random(self) -> bool:
        """Return True if codes are drawn, False if the likeliest one is taken."""
        return self.temperature > 0


def choose(logits_BV: Tensor, sampling: CodeSampling, gumbel_BV: Tensor | None) -> Tensor:
    """Choose one code per row, `[B]`."""
    if not sampling.random or gumbel_BV is None:
        return logits_BV.argmax(-1)
    scores_BV = logits_BV.float() / sampling.temperature
    if 0 < sampling.top_k < scores_BV.shape[-1]:
        threshold_B1 = scores_BV.topk(sampling.top_k).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < threshold_B1, -torch.inf)
    if sampling.top_p < 1:
        sorted_BV, order_BV = scores_BV.sort(descending=True)
        mass_BV = sorted_BV.softmax(-1)
        # the likeliest code always stays
        excluded_BV = mass_BV.cumsum(-1) - mass_BV >= sampling.top_p
        scores_BV = scores_BV.masked_fill(
            torch.zeros_like(excluded_BV).scatter(1, order_BV, excluded_BV), -torch.inf
        )
    return (scores_BV + gumbel_BV[:, : scores_BV.shape[-1]]).argmax(-1)
