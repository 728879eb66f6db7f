"""Draw scenes as pictures, in NumPy.

A picture is square, on a light ground; a thing is near the middle of its cell of the grid. Edges
mix colours by the share of a pixel that a shape covers. Lengths are in units of a picture of 64
pixels; `size` scales them.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import numpy as np
from numpy.typing import NDArray

from recipes.world.scenes import GRID, Scene, Thing

Picture = NDArray[np.uint8]  # (size, size, 3)
Floats = NDArray[np.float64]

SIZE = 64  # pixels of a side
CELL = SIZE / GRID
PALETTE = {
    "red": (220, 30, 35),
    "green": (30, 150, 50),
    "blue": (35, 80, 215),
    "yellow": (245, 215, 30),
    "orange": (250, 130, 15),
    "purple": (135, 40, 165),
    "black": (20, 20, 20),
}
RADII = {"small": 3.2, None: 4.8, "large": 6.4}  # about the radius of a circle of the same area
JITTER = 0.75  # largest offset of a thing from the middle of its cell
GROUND = (236, 252)  # grey of the ground
FURTHEST = 1.6  # in radii: the extent of any shape
SAMPLES = 6  # per pixel and direction


def _star() -> list[tuple[float, float]]:
    """Return the corners of a star of five tips, the first one up."""
    turns = np.arange(10) * np.pi / 5
    reach = np.where(np.arange(10) % 2 == 0, 1.55, 0.68)
    return [
        (float(r * np.sin(turn)), float(-r * np.cos(turn)))
        for r, turn in zip(reach, turns, strict=True)
    ]


# Corners (x to the right, y down) of shapes of radius 1, in order around; a circle has none.
_CORNERS: dict[str, list[tuple[float, float]]] = {
    "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "triangle": [(0.0, -1.4), (1.25, 0.8), (-1.25, 0.8)],
    "star": _star(),
}


def covers(shape: str, x: Floats, y: Floats) -> NDArray[np.bool_]:
    """Return whether points (of any shape) are inside a shape of radius 1 around the origin."""
    if shape == "circle":
        return x * x + y * y <= 1.0
    inside = np.zeros(np.broadcast(x, y).shape, bool)
    corners = _CORNERS[shape]
    for (x0, y0), (x1, y1) in zip(corners, corners[1:] + corners[:1], strict=True):
        if y0 != y1:  # even-odd rule with a ray to the left
            inside ^= ((y0 > y) != (y1 > y)) & (x > (x1 - x0) * (y - y0) / (y1 - y0) + x0)
    return inside


def area(shape: str) -> float:
    """Return the area of a shape of radius 1."""
    if shape == "circle":
        return float(np.pi)
    corners = np.array(_CORNERS[shape])
    following = np.roll(corners, -1, axis=0)
    return abs(float(np.sum(corners[:, 0] * following[:, 1] - corners[:, 1] * following[:, 0]))) / 2


def coverage(shape: str, x: float, y: float, radius: float, size: int = SIZE) -> Floats:
    """Return (size, size): the share of each pixel that a shape covers; lengths in pixels."""
    share = np.zeros((size, size))
    (left, right), (top, bottom) = _reach(x, radius, size), _reach(y, radius, size)
    columns, rows = _samples(left, right), _samples(top, bottom)
    inside = covers(shape, (columns[None, :] - x) / radius, (rows[:, None] - y) / radius)
    share[top:bottom, left:right] = inside.reshape(
        bottom - top, SAMPLES, right - left, SAMPLES
    ).mean(axis=(1, 3))
    return share


def _reach(middle: float, radius: float, size: int) -> tuple[int, int]:
    """Return the pixel range that a shape may cover."""
    low, high = int(np.floor(middle - FURTHEST * radius)), int(np.ceil(middle + FURTHEST * radius))
    return min(max(low, 0), size), min(max(high, 0), size)


def _samples(first: int, end: int) -> Floats:
    return first + (np.arange((end - first) * SAMPLES) + 0.5) / SAMPLES


def draw(scene: Scene, rng: Random, *, size: int = SIZE) -> Picture:
    """Draw a scene; `rng` decides the ground's grey and the exact positions."""
    return draw_things(scene.things, rng, size=size)


def draw_things(things: Iterable[Thing], rng: Random, *, size: int = SIZE) -> Picture:
    """Draw any number of things; later ones cover earlier ones."""
    scale = size / SIZE
    canvas = np.full((size, size, 3), float(rng.randint(*GROUND)))
    for thing in things:
        x, y = _place(thing, rng)
        share = coverage(thing.shape, x * scale, y * scale, RADII[thing.size] * scale, size)[
            ..., None
        ]
        canvas += share * (np.array(PALETTE[thing.colour]) - canvas)
    return np.rint(canvas).astype(np.uint8)


def _place(thing: Thing, rng: Random) -> tuple[float, float]:
    x, y = (
        (place + 0.5) * CELL + rng.uniform(-JITTER, JITTER) for place in (thing.column, thing.row)
    )
    return x, y
