"""Make what pocket-film's stages learn from, as tensors: films, prompts and their labels.

Shapes: B films or prompts · F frames · H height · W width · L prompt tokens · P properties of a
thing (shape, colour, motion) · N things or cells · V wordings.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import T5Tokenizer

from recipes.film.data import Example, crowded_film, example, prompted
from recipes.film.recipe import Recipe
from recipes.film.scenes import (
    COLOURS,
    FRAMES,
    MAX_THINGS,
    MOTIONS,
    SHAPES,
    Actor,
    prompt,
)
from recipes.training.diffusion import NOTHING, numbered
from recipes.world.pictures import CELL
from recipes.world.scenes import GRID

CLASSES = tuple((*names, NOTHING) for names in (SHAPES, COLOURS, MOTIONS))
PLACES = tuple((place, count) for count in range(1, MAX_THINGS + 1) for place in range(count))
TOKEN_CLASSES = (SHAPES, COLOURS, MOTIONS, PLACES)  # what a prompt's token tells of its thing
IGNORED = -100  # label that a loss leaves out
SCALE = 2  # frames of a latent, behind the first


class PromptBatch(NamedTuple):
    """Hold the tokens of prompts `[B, L]` and their class numbers by TOKEN_CLASSES `[B, P, L]`."""

    ids: Tensor
    labels: Tensor


class FilmBatch(NamedTuple):
    """Hold films `[B, F, H, W, 3]` in 8 bits, and what is said of each and where its things are.

    ids: tokens of V wordings `[B, V, L]`. labels: class numbers of the cells `[B, P, N]`. things:
    their number `[B]`.
    """

    films: Tensor
    ids: Tensor
    labels: Tensor
    things: Tensor


def token_labels(tokenizer: T5Tokenizer, ids_BL: Tensor, told: Sequence[list[Actor]]) -> Tensor:
    """Return the class numbers `[B, P, L]` of each token, by TOKEN_CLASSES: of its clause's thing.

    A clause begins with its colour; `-100`, which the loss ignores, stands behind a prompt's end.
    """
    colours = torch.tensor(tokenizer.convert_tokens_to_ids([f"▁{name}" for name in COLOURS]))
    clause_BL = (torch.isin(ids_BL, colours).cumsum(1) - 1).clamp(min=0)
    labels_BPN = torch.zeros(len(told), len(TOKEN_CLASSES), MAX_THINGS, dtype=torch.long)
    for labels_PN, actors in zip(labels_BPN, told, strict=True):
        rows = [(*actor, (place, len(actors))) for place, actor in enumerate(actors)]
        labels_PN[:, : len(actors)] = torch.tensor(numbered(rows, TOKEN_CLASSES))
    index_BPL = clause_BL[:, None].expand(-1, len(TOKEN_CLASSES), -1)
    is_padding_BL = ids_BL == tokenizer.pad_token_id
    return labels_BPN.gather(2, index_BPL).masked_fill(is_padding_BL[:, None], IGNORED)


def cell_labels(one: Example) -> list[list[int]]:
    """Return the class numbers of each token's cell, by CLASSES: the thing whose middle is in it."""
    cells: list[tuple[str, ...]] = [(NOTHING,) * len(CLASSES)] * (latent_frames() * GRID * GRID)
    for actor, course in zip(one.actors, one.courses, strict=True):
        for number in range(latent_frames()):
            x, y = course.at(max(0.0, SCALE * number - 0.5))
            cells[(number * GRID + int(y // CELL)) * GRID + int(x // CELL)] = actor
    return numbered(cells, CLASSES)


def latent_frames() -> int:
    """Return the number of latent frames of a film."""
    return (FRAMES - 1) // SCALE + 1


def token_ids(recipe: Recipe, tokenizer: T5Tokenizer, prompts: list[str]) -> Tensor:
    """Return the tokens `[B, L]` of prompts, padded to the recipe's length."""
    encoded = tokenizer(
        prompts,
        padding="max_length",
        truncation=True,
        max_length=recipe.prompt_tokens,
        return_tensors="pt",
    )
    return encoded.input_ids


def crowded_films(recipe: Recipe, step: int, size: int, frames: int) -> Tensor:
    """Return the autoencoder's films of a step `[B, F, H, W, 3]` in 8 bits."""
    numbers = range(step * size, (step + 1) * size)
    return torch.from_numpy(
        np.stack([crowded_film(recipe.seed, n, recipe.crowd, frames) for n in numbers])
    )


def prompt_batch(recipe: Recipe, tokenizer: T5Tokenizer, step: int, size: int) -> PromptBatch:
    """Return the text encoder's prompts of a step."""
    found = [prompted(recipe.seed, number) for number in range(step * size, (step + 1) * size)]
    ids = token_ids(recipe, tokenizer, [text for text, _ in found])
    return PromptBatch(ids, token_labels(tokenizer, ids, [actors for _, actors in found]))


def film_batch(recipe: Recipe, tokenizer: T5Tokenizer, first: int, size: int) -> FilmBatch:
    """Return films `first` and following ones, each with `recipe.wordings` prompts."""
    found = [example(recipe.seed, number) for number in range(first, first + size)]
    rng = Random(f"film/{recipe.seed}/words/{first}")
    texts = [prompt(one.actors, rng) for one in found for _ in range(recipe.wordings)]
    return FilmBatch(
        torch.from_numpy(np.stack([one.film for one in found])),
        token_ids(recipe, tokenizer, texts).unflatten(0, (size, recipe.wordings)),
        torch.tensor([cell_labels(one) for one in found]),
        torch.tensor([len(one.actors) for one in found]),
    )
