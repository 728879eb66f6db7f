"""Pool the vectors of a text's tokens into one, as sentence-transformers does.

T tokens of one text · D numbers per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """Pool token vectors in several ways, concatenated in the order of MODES.

    include_prompt: whether the tokens of a prompt count, in modes that pool more than one token.
    """

    modes: tuple[str, ...] = ("mean",)
    include_prompt: bool = True

    def __post_init__(self) -> None:
        if not self.modes or not set(self.modes) <= set(MODES):
            raise ValueError(
                f"pooling: {', '.join(self.modes) or 'nothing'} is no mode; use some of {', '.join(MODES)}"
            )

    def pool(self, tokens_TD: Tensor, prompt: int = 0) -> Tensor:
        """Return `[D * len(modes)]` float32; the first `prompt` tokens are a prompt's."""
        tokens_TD = tokens_TD.float()
        skip = 0 if self.include_prompt else min(prompt, len(tokens_TD) - 1)
        return torch.cat([_pool(mode, tokens_TD, skip) for mode in MODES if mode in self.modes])


def _pool(mode: str, tokens_TD: Tensor, skip: int) -> Tensor:
    if mode == "cls":
        return tokens_TD[0]
    if mode == "lasttoken":
        return tokens_TD[-1]
    counted_TD = tokens_TD[skip:]
    if mode == "max":
        return counted_TD.amax(dim=0)
    if mode == "mean":
        return counted_TD.mean(dim=0)
    if mode == "mean_sqrt_len_tokens":
        output: Tensor = counted_TD.sum(dim=0) / len(counted_TD) ** 0.5
        return output
    places_T = torch.arange(
        skip + 1, len(tokens_TD) + 1, dtype=torch.float32, device=tokens_TD.device
    )
    return places_T @ counted_TD / places_T.sum()
