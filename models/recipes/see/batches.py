"""Batch the training data of both pocket_see.py stages as tensors, by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from recipes.chat.batches import MICRO_BATCH, Batch, ConversationEncoder, chunked, pad
from recipes.chat.stream import training_conversation
from recipes.see.data import CELLS, PictureConversation, cell_picture, picture_conversation
from recipes.see.recipe import Recipe
from recipes.training.errors import RecipeError
from recipes.world.pictures import Picture


def pixels(pictures: Sequence[Picture]) -> Tensor:
    """Convert pictures to `[B, 3, H, W]` from -1 to 1, as the image processor does at this size."""
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1


def packed(pixels: Tensor) -> Tensor:
    """Return what `pixels` made as bytes, a quarter of its size on the way between processes."""
    return ((pixels + 1) * 127.5).round().byte()


def unpacked(pixels: Tensor) -> Tensor:
    """Return pixels from -1 to 1 of `packed` ones."""
    return pixels.float() / 127.5 - 1


class CellBatch(NamedTuple):
    """Hold pictures `[B, 3, H, W]` and the kind number of each cell `[B, CELLS]`."""

    pixels: Tensor
    kinds: Tensor


def cell_batch(recipe: Recipe, step: int) -> CellBatch:
    """Return the tower's batch of `step`; each picture is used once."""
    size = recipe.tower.batch
    examples = [
        cell_picture(recipe.seed, index, crowded_share=recipe.crowded_share)
        for index in range(step * size, (step + 1) * size)
    ]
    return CellBatch(
        pixels([one.picture for one in examples]),
        torch.from_numpy(np.stack([one.kinds for one in examples])),
    )


class PictureBatch(NamedTuple):
    """Hold token rows and their pictures `[B, 3, H, W]` in order; None without pictures."""

    batch: Batch
    pixels: Tensor | None


class Row(NamedTuple):
    """Hold the token ids, loss weights and pictures of a conversation."""

    ids: list[int]
    weights: list[float]
    pictures: tuple[Picture, ...]


class Stream:
    """Serve conversations with and without pictures, by step."""

    def __init__(
        self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, placeholder: int
    ) -> None:
        self.recipe, self.placeholder, self.pad = recipe, placeholder, tokenizer.pad_token_id
        self.encoder = ConversationEncoder(tokenizer, recipe.prompt_weight)
        self.micro_batch = MICRO_BATCH  # padded tokens, at most

    def row(self, index: int) -> Row:
        """Return conversation `index`; the first ones of every step have pictures."""
        recipe = self.recipe
        if index % recipe.talk.batch >= round(recipe.picture_share * recipe.talk.batch):
            return Row(
                *self.encoder.encode(
                    training_conversation(recipe.seed, index, mix=recipe.text_mix)
                ),
                (),
            )
        mix = recipe.viewing_mix(index // recipe.talk.batch)
        return self.picture_row(picture_conversation(recipe.seed, index, mix=mix))

    def picture_row(self, example: PictureConversation) -> Row:
        """Encode a conversation with pictures. Raises RecipeError if the template drops one."""
        ids, weights = self.encoder.encode(example.conversation)
        if ids.count(self.placeholder) != len(example.pictures):
            raise RecipeError(
                f"a conversation renders {ids.count(self.placeholder)} image tokens for"
                f" {len(example.pictures)} pictures: check the chat template",
                param="tokenizer",
            )
        expanded: Row = Row([], [], example.pictures)
        for token, weight in zip(ids, weights, strict=True):
            is_picture = token == self.placeholder
            expanded.ids.extend([token] * (CELLS if is_picture else 1))
            expanded.weights.extend([0.0] * CELLS if is_picture else [weight])
        return expanded

    def batches(self, step: int) -> list[PictureBatch]:
        """Return the micro-batches of `step`: rows of similar length, those with pictures apart."""
        size = self.recipe.talk.batch
        rows = sorted(
            (self.row(index) for index in range(step * size, (step + 1) * size)),
            key=lambda row: len(row.ids),
        )
        groups = (
            [row for row in rows if bool(row.pictures) == pictured] for pictured in (False, True)
        )
        return [
            self._picture_batch(chunk)
            for group in groups
            for chunk in chunked(group, lambda row: len(row.ids), most=self.micro_batch)
            if chunk
        ]

    def _picture_batch(self, rows: list[Row]) -> PictureBatch:
        pictures = [picture for row in rows for picture in row.pictures]
        return PictureBatch(
            pad([(row.ids, row.weights) for row in rows], self.pad),
            pixels(pictures) if pictures else None,
        )

    def prefetch(self, start: int, stop: int) -> Iterator[list[PictureBatch]]:
        """Yield the batches of steps `start` to `stop`, each computed one step ahead in a thread."""
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(self.batches, start)
            for step in range(start, stop):
                ready, pending = pending.result(), pool.submit(self.batches, step + 1)
                yield ready
