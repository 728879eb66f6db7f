"""What is on a picture, and whether it is what was asked for: a checker in plain NumPy, without any model.

A pixel is the ground with some of one colour upon it. Pixels of a colour that touch are a thing; its shape is the one
that, drawn at its place with its area, differs least from it. Meant for pictures of `world_pictures` and for those that
a model draws after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from world import SHAPES, Kind, Scene, Thing
from world_pictures import PALETTE, RADII, SIZE, Floats, Picture, area, coverage

LEAST_SHARE = 0.35  # of a colour in a pixel that belongs to a thing
LEAST_AREA = 9.0  # pixels at SIZE: what is smaller is a spot
MOST_MISFIT = 0.38  # share of its area by which a thing may differ from its shape
MOST_SPOTS = 12.0  # pixels of colour that belong to no thing
APART = 4.0  # pixels at SIZE by which things must differ to be left of, or above, one another


class Found(NamedTuple):
    """A thing on a picture; its place in pixels at SIZE, from the top left."""

    shape: str
    colour: str
    size: str | None
    x: float
    y: float
    misfit: float

    @property
    def kind(self) -> Kind:
        return Kind(shape=self.shape, colour=self.colour, size=self.size)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """All things on a picture, from left to right, and the colour that is no thing's, in pixels."""

    things: tuple[Found, ...]
    spots: float


class Verdict(NamedTuple):
    right: bool
    why: str = ""


def look(picture: Picture) -> Seen:
    """What is there, on any picture of shape (n, n, 3)."""
    if picture.ndim != 3 or picture.shape[0] != picture.shape[1] or picture.shape[2] != 3:
        raise ValueError(
            f"picture has shape {picture.shape}: give a square one with three channels"
        )
    scale = picture.shape[0] / SIZE
    colours, shares = unmix(picture)
    things, spots = [], 0.0
    for number, colour in enumerate(PALETTE):
        mine = np.where(colours == number, shares, 0.0)
        for part in parts(mine >= LEAST_SHARE):
            ample = np.where(_grown(part), mine, 0.0)
            if ample.sum() < LEAST_AREA * scale**2:
                spots += float(ample.sum()) / scale**2
            else:
                things.append(_recognize(ample, colour, scale))
    return Seen(things=tuple(sorted(things, key=lambda one: one.x)), spots=spots)


def unmix(picture: Picture) -> tuple[NDArray[np.int64], Floats]:
    """Per pixel, the colour (by its number in PALETTE) that explains it best upon the ground, and its share, 0 to 1."""
    pixels = picture.astype(np.float64)
    ground = np.median(pixels.reshape(-1, 3), axis=0)
    rays = np.array(list(PALETTE.values()), np.float64) - ground
    away = pixels - ground
    shares = np.clip(np.einsum("hwc,kc->hwk", away, rays) / np.sum(rays * rays, axis=1), 0.0, 1.0)
    rest = np.sum((away[:, :, None] - shares[..., None] * rays) ** 2, axis=-1)
    best = rest.argmin(axis=-1)
    return best, np.take_along_axis(shares, best[..., None], axis=-1)[..., 0]


def parts(mask: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    """The parts of a mask whose pixels touch by a side, from the top left."""
    numbers = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    while True:
        padded = np.pad(numbers, 1)
        near = [padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:], numbers]
        spread = np.where(mask, np.max(near, axis=0), 0)
        if np.array_equal(spread, numbers):
            return [numbers == number for number in np.unique(numbers) if number]
        numbers = spread


def _grown(part: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """With the pixels around it, in which its edge is mixed with the ground."""
    padded = np.pad(part, 1)
    height, width = part.shape
    near = [padded[y : y + height, x : x + width] for y in range(3) for x in range(3)]
    return np.asarray(np.any(near, axis=0))


def _recognize(share: Floats, colour: str, scale: float) -> Found:
    """The thing whose share of every pixel this is."""
    total = float(share.sum())
    middles = np.arange(len(share)) + 0.5
    x, y = (
        float((share.sum(axis=0) @ middles) / total),
        float((share.sum(axis=1) @ middles) / total),
    )
    misfits = {}
    for shape in SHAPES:
        radius = (total / area(shape)) ** 0.5
        left, up = _middle(shape)
        due = coverage(shape, x - left * radius, y - up * radius, radius, len(share))
        misfits[shape] = float(np.abs(due - share).sum()) / total
    best = min(misfits, key=misfits.__getitem__)
    radius = (total / area(best)) ** 0.5 / scale
    size = min(RADII, key=lambda name: abs(RADII[name] - radius))
    return Found(best, colour, size, x / scale, y / scale, misfits[best])


@cache
def _middle(shape: str) -> tuple[float, float]:
    """Where the centre of a shape's area is, from the point that it is drawn around, at radius 1."""
    drawn = coverage(shape, SIZE / 2, SIZE / 2, SIZE / 4)
    middles = (np.arange(SIZE) + 0.5 - SIZE / 2) / (SIZE / 4)
    total = drawn.sum()
    return float(drawn.sum(axis=0) @ middles / total), float(drawn.sum(axis=1) @ middles / total)


# --------------------------------------------------------------------------------------------------------- judging
def check(picture: Picture, scene: Scene) -> Verdict:
    """Whether a picture shows a scene as words tell it: these things and no others, in order where they are in a row
    or a column. A thing of no size that is told may be drawn in any; where scattered things stand is not told.
    """
    seen = look(picture)
    if seen.spots > MOST_SPOTS:
        return Verdict(False, f"{seen.spots:.0f} pixels of colour belong to no thing")
    if odd := [one for one in seen.things if one.misfit > MOST_MISFIT]:
        return Verdict(
            False,
            f"a {odd[0].colour} thing has no shape ({odd[0].misfit:.2f} off a {odd[0].shape})",
        )
    if len(seen.things) != len(scene.things):
        return Verdict(False, f"{len(seen.things)} things, not {len(scene.things)}")
    fitting = [order for order in permutations(seen.things) if _alike(order, scene.things)]
    if not fitting:
        told = ", ".join(one.kind.phrase() for one in seen.things)
        return Verdict(
            False,
            f"it shows {told}; due are {', '.join(thing.kind.phrase() for thing in scene.things)}",
        )
    if not any(_in_order(order, scene) for order in fitting):
        return Verdict(
            False, f"the things are there, but not in a {scene.arrangement} in this order"
        )
    return Verdict(True)


def _alike(order: Sequence[Found], things: Sequence[Thing]) -> bool:
    return all(thing.kind.matches(one.kind) for one, thing in zip(order, things, strict=True))


def _in_order(order: Sequence[Found], scene: Scene) -> bool:
    if scene.arrangement == "scatter":
        return True
    along, across = ("x", "y") if scene.arrangement == "row" else ("y", "x")
    steps = [
        (
            getattr(after, along) - getattr(one, along),
            abs(getattr(after, across) - getattr(one, across)),
        )
        for one, after in pairwise(order)
    ]
    return all(ahead > max(APART, aside) for ahead, aside in steps)
