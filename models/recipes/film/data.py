"""Make pocket-film examples: prompts and films, each a function of (seed, index)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

from recipes.film.drawing import Film, draw
from recipes.film.scenes import (
    FRAMES,
    Actor,
    Course,
    canonical,
    course,
    place,
    prompt,
    sample_actors,
)
from recipes.training.held_out_seeds import HELD_OUT_SEEDS, check_training_seed, in_held_out_share

HELD_OUT_SHARE = 12  # one set of things in HELD_OUT_SHARE is held out


class Example(NamedTuple):
    """Hold a prompt, what it says, and where the things of its film are."""

    prompt: str
    actors: list[Actor]
    courses: list[Course]
    film: Film


def is_held_out(actors: Sequence[Actor]) -> bool:
    """Return True for sets of things and motions that training excludes, whatever the seed."""
    return in_held_out_share(f"film {canonical(actors)}", HELD_OUT_SHARE)


def example(seed: int, index: int) -> Example:
    """Return a training example. Raises RecipeError for a held-out seed."""
    check_training_seed(seed)
    rng = Random(f"film/{seed}/{index}")
    while True:
        actors = sample_actors(rng)
        if is_held_out(actors) or (courses := place(actors, rng)) is None:
            continue
        return Example(prompt(actors, rng), actors, courses, draw(actors, courses, rng))


def prompted(seed: int, index: int) -> tuple[str, list[Actor]]:
    """Return a training prompt and what it says, without a film."""
    check_training_seed(seed)
    rng = Random(f"film/{seed}/prompt/{index}")
    while is_held_out(actors := sample_actors(rng)):
        pass
    return prompt(actors, rng), actors


def crowded_film(seed: int, index: int, things: int, frames: int = FRAMES) -> Film:
    """Return the first `frames` of a film of many things, which may cover one another."""
    check_training_seed(seed)
    rng = Random(f"film/{seed}/crowd/{index}")
    actors = [rng.choice(sample_actors(rng)) for _ in range(things)]
    return draw(actors, [course(actor, rng) for actor in actors], rng, frames)


def held_out(count: int) -> Iterator[tuple[str, list[Actor]]]:
    """Yield `count` held-out prompts and what they say."""
    found = 0
    for seed in HELD_OUT_SEEDS:
        rng = Random(f"film/{seed}")
        if is_held_out(actors := sample_actors(rng)):
            yield prompt(actors, rng), actors
            found += 1
        if found == count:
            return
