"""What pocket-chat's eyes and words learn from, as tensors, by training step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from chat_batches import Batch, Encoder, chunked, pad
from chat_stream import conversation
from see_data import CELLS, cells, sighted
from see_recipe import Recipe
from world_pictures import Picture


def pixels(pictures: Sequence[Picture]) -> Tensor:
    """`[B, 3, H, W]` from -1 to 1, as the image processor makes it of pictures of this size."""
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1


class Patchwork(NamedTuple):
    """Pictures `[B, 3, H, W]` and what stands in their cells `[B, CELLS]`, by number."""

    pixels: Tensor
    kinds: Tensor


def patchwork(recipe: Recipe, step: int) -> Patchwork:
    """What the tower learns from in `step`; every picture is used once."""
    size = recipe.tower.batch
    made = [
        cells(recipe.seed, index, crowded=recipe.crowded)
        for index in range(step * size, (step + 1) * size)
    ]
    return Patchwork(
        pixels([one.picture for one in made]),
        torch.from_numpy(np.stack([one.kinds for one in made])),
    )


class Shown(NamedTuple):
    """Rows and the pictures that stand in them, `[B, 3, H, W]` in order; None if there are none."""

    batch: Batch
    pixels: Tensor | None


class Row(NamedTuple):
    ids: list[int]
    weights: list[float]
    pictures: tuple[Picture, ...]


class Stream:
    """Conversations with pictures and without, by step."""

    def __init__(
        self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, placeholder: int
    ) -> None:
        self.recipe, self.placeholder, self.pad = recipe, placeholder, tokenizer.pad_token_id
        self.encoder = Encoder(tokenizer, recipe.prompt_weight)

    def row(self, index: int) -> Row:
        """The conversation number `index`: the first ones of every step are about pictures."""
        recipe = self.recipe
        if index % recipe.talk.batch >= round(recipe.shown * recipe.talk.batch):
            return Row(*self.encoder.encode(conversation(recipe.seed, index, mix=recipe.words)), ())
        found = sighted(recipe.seed, index, mix=recipe.looking(index // recipe.talk.batch))
        ids, weights = self.encoder.encode(found.made)
        if ids.count(self.placeholder) != len(found.pictures):
            raise ValueError(
                f"conversation {index} shows {ids.count(self.placeholder)} of {len(found.pictures)}"
            )
        spread: Row = Row([], [], found.pictures)
        for token, weight in zip(ids, weights, strict=True):
            is_picture = token == self.placeholder
            spread.ids.extend([token] * (CELLS if is_picture else 1))
            spread.weights.extend([0.0] * CELLS if is_picture else [weight])
        return spread

    def batches(self, step: int) -> list[Shown]:
        """The micro-batches of `step`: rows of similar length, those with pictures apart."""
        size = self.recipe.talk.batch
        rows = sorted(
            (self.row(index) for index in range(step * size, (step + 1) * size)),
            key=lambda row: len(row.ids),
        )
        apart = ([row for row in rows if bool(row.pictures) == shown] for shown in (False, True))
        return [
            self._shown(chunk)
            for some in apart
            for chunk in chunked(some, lambda row: len(row.ids))
            if chunk
        ]

    def _shown(self, rows: list[Row]) -> Shown:
        pictures = [picture for row in rows for picture in row.pictures]
        return Shown(
            pad([(row.ids, row.weights) for row in rows], self.pad),
            pixels(pictures) if pictures else None,
        )

    def ahead(self, start: int, stop: int) -> Iterator[list[Shown]]:
        """The batches of steps `start` to `stop`, made one step ahead in a thread."""
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(self.batches, start)
            for step in range(start, stop):
                ready, coming = coming.result(), pool.submit(self.batches, step + 1)
                yield ready
