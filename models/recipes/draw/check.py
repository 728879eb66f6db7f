"""Detect the things of a picture and compare them with a scene, in NumPy without a model.

A pixel mixes the ground with one colour. Connected pixels of a colour are a thing; its shape is the
one whose rendering at its place and area differs least from it. Meant for pictures of
`world.pictures` and for those that a model trained on them generates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.training.errors import RecipeError
from recipes.world.pictures import PALETTE, RADII, SIZE, Floats, Picture, area, coverage
from recipes.world.scenes import SHAPES, Kind, Scene, Thing

MIN_SHARE = 0.35  # of a colour in a pixel of a thing
MIN_AREA = 9.0  # pixels at SIZE; smaller components are speckle
MAX_MISFIT = 0.38  # limit on `DetectedThing.misfit`
MAX_SPECKLE = 12.0  # limit on `Detection.speckle`
MIN_SEPARATION = 4.0  # pixels at SIZE between things that are left of, or above, one another


class DetectedThing(NamedTuple):
    """Hold a detected thing; x and y are pixels at SIZE from the top left.

    misfit: the difference from its shape, as a share of its area.
    """

    shape: str
    colour: str
    size: str | None
    x: float
    y: float
    misfit: float

    @property
    def kind(self) -> Kind:
        """Return the shape, colour and size."""
        return Kind(shape=self.shape, colour=self.colour, size=self.size)


@dataclass(frozen=True, kw_only=True)
class Detection:
    """Hold the detected things, from left to right.

    speckle: pixels of colour that belong to no thing.
    """

    things: tuple[DetectedThing, ...]
    speckle: float


class CheckResult(NamedTuple):
    """Hold whether a picture shows a scene, and the reason if not."""

    correct: bool
    reason: str = ""


def detect_things(picture: Picture) -> Detection:
    """Detect the things of a picture (n, n, 3). Raises RecipeError for another shape."""
    if picture.ndim != 3 or picture.shape[0] != picture.shape[1] or picture.shape[2] != 3:
        raise RecipeError(
            f"picture has shape {picture.shape}: give a square one with three channels",
            param="picture",
        )
    scale = picture.shape[0] / SIZE
    colours, shares = unmix(picture)
    things, speckle = [], 0.0
    for number, colour in enumerate(PALETTE):
        own_shares = np.where(colours == number, shares, 0.0)
        for part in connected_components(own_shares >= MIN_SHARE):
            ample = np.where(_dilated(part), own_shares, 0.0)
            if ample.sum() < MIN_AREA * scale**2:
                speckle += float(ample.sum()) / scale**2
            else:
                things.append(_classify(ample, colour, scale))
    return Detection(things=tuple(sorted(things, key=lambda one: one.x)), speckle=speckle)


def unmix(picture: Picture) -> tuple[NDArray[np.int64], Floats]:
    """Return per pixel the number of the best-fitting colour in PALETTE, and its share, 0 to 1."""
    pixels = picture.astype(np.float64)
    ground = np.median(pixels.reshape(-1, 3), axis=0)
    rays = np.array(list(PALETTE.values()), np.float64) - ground
    away = pixels - ground
    shares = np.clip(np.einsum("hwc,kc->hwk", away, rays) / np.sum(rays * rays, axis=1), 0.0, 1.0)
    rest = np.sum((away[:, :, None] - shares[..., None] * rays) ** 2, axis=-1)
    best = rest.argmin(axis=-1)
    return best, np.take_along_axis(shares, best[..., None], axis=-1)[..., 0]


def connected_components(mask: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    """Return the 4-connected components of a mask, in row-major order."""
    numbers = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    while True:
        padded = np.pad(numbers, 1)
        near = [padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:], numbers]
        spread = np.where(mask, np.max(near, axis=0), 0)
        if np.array_equal(spread, numbers):
            return [numbers == number for number in np.unique(numbers) if number]
        numbers = spread


def _dilated(part: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Dilate a component by a pixel, since its edge is mixed with the ground."""
    padded = np.pad(part, 1)
    height, width = part.shape
    near = [padded[y : y + height, x : x + width] for y in range(3) for x in range(3)]
    return np.asarray(np.any(near, axis=0))


def _classify(share: Floats, colour: str, scale: float) -> DetectedThing:
    """Return the thing with these shares of each pixel."""
    total = float(share.sum())
    middles = np.arange(len(share)) + 0.5
    x, y = (
        float((share.sum(axis=0) @ middles) / total),
        float((share.sum(axis=1) @ middles) / total),
    )
    misfits = {}
    for shape in SHAPES:
        radius = (total / area(shape)) ** 0.5
        left, up = _centroid(shape)
        expected = coverage(shape, x - left * radius, y - up * radius, radius, len(share))
        misfits[shape] = float(np.abs(expected - share).sum()) / total
    best = min(misfits, key=misfits.__getitem__)
    radius = (total / area(best)) ** 0.5 / scale
    size = min(RADII, key=lambda name: abs(RADII[name] - radius))
    return DetectedThing(best, colour, size, x / scale, y / scale, misfits[best])


@cache
def _centroid(shape: str) -> tuple[float, float]:
    """Return the centroid of a shape of radius 1, relative to the point that it is drawn around."""
    drawn = coverage(shape, SIZE / 2, SIZE / 2, SIZE / 4)
    middles = (np.arange(SIZE) + 0.5 - SIZE / 2) / (SIZE / 4)
    total = drawn.sum()
    return float(drawn.sum(axis=0) @ middles / total), float(drawn.sum(axis=1) @ middles / total)


# ------------------------------------------------------------------------------------------------------- checking
def check(picture: Picture, scene: Scene) -> CheckResult:
    """Return whether a picture shows a scene: the same things, in order for rows and columns.

    A thing without a size matches any size; positions of scattered things are not compared.
    """
    detection = detect_things(picture)
    if detection.speckle > MAX_SPECKLE:
        return CheckResult(False, f"{detection.speckle:.0f} pixels of colour belong to no thing")
    if odd := [one for one in detection.things if one.misfit > MAX_MISFIT]:
        return CheckResult(
            False,
            f"a {odd[0].colour} thing has no known shape ({odd[0].misfit:.2f} off {odd[0].shape})",
        )
    if len(detection.things) != len(scene.things):
        return CheckResult(False, f"{len(detection.things)} things, not {len(scene.things)}")
    matching = [
        order for order in permutations(detection.things) if _same_kinds(order, scene.things)
    ]
    if not matching:
        shown = ", ".join(one.kind.phrase() for one in detection.things)
        return CheckResult(
            False,
            f"it shows {shown}, not {', '.join(thing.kind.phrase() for thing in scene.things)}",
        )
    if not any(_in_order(order, scene) for order in matching):
        return CheckResult(
            False, f"the things match, but are not in a {scene.arrangement} in this order"
        )
    return CheckResult(True)


def _same_kinds(order: Sequence[DetectedThing], things: Sequence[Thing]) -> bool:
    return all(thing.kind.matches(one.kind) for one, thing in zip(order, things, strict=True))


def _in_order(order: Sequence[DetectedThing], scene: Scene) -> bool:
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
    return all(ahead > max(MIN_SEPARATION, aside) for ahead, aside in steps)
