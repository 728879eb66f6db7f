"""Make pocket-draw examples: scenes, prompts and pictures, each a function of (seed, index)."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from recipes.training.held_out_seeds import HELD_OUT_SEEDS, check_training_seed, in_held_out_share
from recipes.world.pictures import Picture, draw
from recipes.world.scenes import Scene, canonical, describe, inventory, sample_scene

MAX_SCENE_THINGS = 3
HELD_OUT_SHARE = 12  # one scene in HELD_OUT_SHARE is held out


class Example(NamedTuple):
    """Hold a prompt, its scene and a picture of it."""

    prompt: str
    scene: Scene
    picture: Picture


def is_held_out(scene: Scene) -> bool:
    """Return True for scenes that training excludes, whatever the seed; never for single things."""
    if len(scene.things) < 2:
        return False
    return in_held_out_share(f"{scene.arrangement} {canonical(scene)}", HELD_OUT_SHARE)


def prompt(scene: Scene, rng: Random) -> str:
    """Return words for a picture: rows and columns in order, scattered things by kind."""
    text = (
        inventory(scene, digits=rng.random() < 0.1)
        if scene.arrangement == "scatter"
        else canonical(scene)
    )
    text = text if rng.random() < 0.5 else describe(scene, rng)
    if rng.random() < 0.3:
        text = rng.choice(
            ("a picture of {0}", "an image of {0}", "a drawing of {0}", "{0}")
        ).format(text)
    return text.lower().rstrip(".") if rng.random() < 0.5 else text


def example(seed: int, index: int) -> Example:
    """Return a training example of 1 to MAX_SCENE_THINGS things.

    Raises RecipeError for a held-out seed.
    """
    check_training_seed(seed)
    rng = Random(f"draw/{seed}/{index}")
    while is_held_out(scene := sample_scene(rng, max_things=MAX_SCENE_THINGS)):
        pass
    return Example(prompt(scene, rng), scene, draw(scene, rng))


def batch(seed: int, step: int, size: int) -> list[Example]:
    """Return the examples of a step; each is used once."""
    return [example(seed, index) for index in range(step * size, (step + 1) * size)]


def held_out(count: int, max_things: int = MAX_SCENE_THINGS) -> Iterator[tuple[str, Scene]]:
    """Yield `count` held-out prompts and scenes, of two to `max_things` things."""
    found = 0
    for seed in HELD_OUT_SEEDS:
        rng = Random(f"draw/{seed}")
        scene = sample_scene(rng, min_things=2, max_things=max_things)
        if 2 <= len(scene.things) <= max_things and is_held_out(scene):
            yield prompt(scene, rng), scene
            found += 1
        if found == count:
            return
