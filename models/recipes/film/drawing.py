"""Draw films of moving shapes, in NumPy, as `world.pictures` draws pictures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random

import numpy as np
from numpy.typing import NDArray

from recipes.film.scenes import FRAMES, Actor, Course
from recipes.world.pictures import GROUND, PALETTE, SIZE, coverage

Film = NDArray[np.uint8]  # (FRAMES, SIZE, SIZE, 3)

_FINENESS = 4  # steps of a position and a radius in a pixel, so that outlines repeat
_REACH = 13  # pixels from the middle of an outline to its edge, above any thing's


def draw(
    actors: Sequence[Actor], courses: Sequence[Course], rng: Random, frames: int = FRAMES
) -> Film:
    """Draw the first `frames` of a film; `rng` decides the ground's grey."""
    film = np.full((frames, SIZE, SIZE, 3), float(rng.randint(*GROUND)), np.float32)
    for actor, course in zip(actors, courses, strict=True):
        colour = np.array(PALETTE[actor.colour], np.float32)
        for frame, canvas in enumerate(film):
            x, y, radius = (
                round(value * _FINENESS) for value in (*course.at(frame), course.radius)
            )
            share = _outline(actor.shape, x % _FINENESS, y % _FINENESS, radius)
            (up, down, top), (left, right, first) = _window(y), _window(x)
            part = share[top : top + down - up, first : first + right - left, None]
            place = canvas[up:down, left:right]
            place += part * (colour - place)
    return np.rint(film).astype(np.uint8)


def _window(middle: int) -> tuple[int, int, int]:
    """Return the pixels that an outline covers, first and end, and the first of the outline's."""
    start = middle // _FINENESS - _REACH
    return max(start, 0), min(start + 2 * _REACH + 1, SIZE), max(-start, 0)


@cache
def _outline(shape: str, x: int, y: int, radius: int) -> NDArray[np.float32]:
    """Return the share of each pixel that a shape covers; lengths in pixels times _FINENESS."""
    size = 2 * _REACH + 1
    left, top = _REACH + x / _FINENESS, _REACH + y / _FINENESS
    return coverage(shape, left, top, radius / _FINENESS, size).astype(np.float32)
