"""What pocket-draw learns from: scenes, what is said of them, and their pictures, each a function of (seed, index)."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from random import Random
from typing import NamedTuple

from world import Scene, canonical, describe, inventory, sample_scene
from world_pictures import Picture, draw

HELD_OUT_SEEDS = range(900_000_000, 1_000_000_000)
MOST_THINGS = 3
HELD_OUT_SHARE = 12  # of so many scenes of two things or more, one is held out


class Example(NamedTuple):
    prompt: str
    scene: Scene
    picture: Picture


def is_held_out(scene: Scene) -> bool:
    """A property of what is told of a scene, so that no seed brings it back. Single things are too few to be split."""
    if len(scene.things) < 2:
        return False
    told = f"{scene.arrangement} {canonical(scene)}"
    return (
        int.from_bytes(blake2b(told.encode(), digest_size=8).digest(), "big") % HELD_OUT_SHARE == 0
    )


def prompt(scene: Scene, rng: Random) -> str:
    """Words for a picture of a scene. In rows and columns they tell the order, of scattered things only the kinds."""
    plain = (
        inventory(scene, digits=rng.random() < 0.1)
        if scene.arrangement == "scatter"
        else canonical(scene)
    )
    text = plain if rng.random() < 0.5 else describe(scene, rng)
    if rng.random() < 0.3:
        text = rng.choice(
            ("a picture of {0}", "an image of {0}", "a drawing of {0}", "{0}")
        ).format(text)
    return text.lower().rstrip(".") if rng.random() < 0.5 else text


def example(seed: int, index: int) -> Example:
    """A scene of one to MOST_THINGS things to learn from. ValueError for seeds that are held out."""
    if seed in HELD_OUT_SEEDS:
        raise ValueError(f"seed {seed} is held out: train with another one")
    rng = Random(f"draw/{seed}/{index}")
    while is_held_out(scene := sample_scene(rng, most=MOST_THINGS)):
        pass
    return Example(prompt(scene, rng), scene, draw(scene, rng))


def batch(seed: int, step: int, size: int) -> list[Example]:
    """The examples of a step; each is used once."""
    return [example(seed, index) for index in range(step * size, (step + 1) * size)]


def held_out(count: int, most: int = MOST_THINGS) -> Iterator[tuple[str, Scene]]:
    """Prompts of `count` scenes of two to `most` things that no training has seen."""
    found = 0
    for seed in HELD_OUT_SEEDS:
        rng = Random(f"draw/{seed}")
        scene = sample_scene(rng, least=2, most=most)
        if 2 <= len(scene.things) <= most and is_held_out(scene):
            yield prompt(scene, rng), scene
            found += 1
        if found == count:
            return
