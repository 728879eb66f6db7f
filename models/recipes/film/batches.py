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
SCALE = 2  # frames of a latent, behind the first


class PromptBatch(NamedTuple):
    """Hold the tokens of prompts `[B, L]` and the class numbers of their things `[B, P, N]`."""

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


def prompt_labels(actors: Sequence[Actor]) -> list[list[int]]:
    """Return the class numbers of a prompt's things, in order, by CLASSES."""
    absent = [(NOTHING,) * len(CLASSES)] * (MAX_THINGS - len(actors))
    return numbered([*actors, *absent], CLASSES)


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
    return PromptBatch(
        token_ids(recipe, tokenizer, [text for text, _ in found]),
        torch.tensor([prompt_labels(actors) for _, actors in found]),
    )


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
