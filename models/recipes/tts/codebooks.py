"""Fit the codec's codes: principal components of the features, and codebooks by k-means."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from motet_tts.pocket.codec import SpeechCodec, nearest
from recipes.training.errors import RecipeError

ROUNDS = 15


@torch.no_grad()
def fit(codec: SpeechCodec, features: Sequence[Tensor], generator: torch.Generator) -> float:
    """Fit encoder and codebooks to sentences `[frames, bands + 2]`; return the error's share."""
    encoder = codec.encoder
    stacked = torch.cat([encoder.stack(one[None])[0] for one in features])
    encoder.mean.copy_(stacked.mean(0))
    spread = stacked - encoder.mean
    _, axes = torch.linalg.eigh(spread.mT @ spread)  # in ascending order
    encoder.axes.copy_(axes.flip(1)[:, : encoder.axes.shape[1]])
    left = spread @ encoder.axes
    for book in codec.quantizer.books:
        book.copy_(k_means(left, len(book), generator))
        left = left - functional.embedding(nearest(left, book), book)
    return float(left.square().sum() / spread.square().sum())


def k_means(latents_ND: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return centres `[count, D]`; empty ones restart at random latents.

    Raises RecipeError for fewer latents than centres.
    """
    if len(latents_ND) < count:
        raise RecipeError(
            f"latents_ND has {len(latents_ND)} code frames for {count} codes: fit on more sentences",
            param="latents_ND",
        )

    def draw(some: int) -> Tensor:
        return latents_ND[torch.randperm(len(latents_ND), generator=generator)[:some]]

    centres = draw(count)
    for _ in range(ROUNDS):
        codes = nearest(latents_ND, centres)
        counts = torch.bincount(codes, minlength=count)[:, None]
        sums = torch.zeros_like(centres).index_add(0, codes, latents_ND)
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), draw(count))
    return centres
