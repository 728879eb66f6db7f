"""Detect the moving things of a film and compare them with what a prompt says, without a model.

Nothing here comes from how the recipe draws: a pixel belongs to a thing if it is far from the
frame's median colour, its colour is decided by hue and lightness, connected pixels are a thing, and
its shape is decided by how much of its bounding box it fills and where its centroid is in it. Things
are followed from frame to frame; their motion is the path of the centroid and the course of the area.
Lengths are in pixels of a frame of 64 pixels a side and scaled with the frame.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.draw.check import CheckResult, connected_components
from recipes.film.scenes import Actor
from recipes.training.errors import RecipeError

Frames = NDArray[np.uint8]  # (frames, n, n, 3)
Floats = NDArray[np.float64]

_SIDE = 64
_MIN_CONTRAST = 60.0  # distance of a thing's pixel from the ground, of about 441
_MIN_AREA = 12.0  # smaller components are speckle
_MAX_SPECKLE = 14.0  # pixels in a frame that belong to no thing
_STILL = 4.0  # a thing moves less
_FAR = 12.0  # a thing moves further
_MAX_SLANT = 0.35  # of the way across to the way along
_MAX_JUMP = 8.0  # from one frame to the next
_GROWN = 1.5  # times the area, at the end
_MAX_ODD_FRAMES = 0.3  # share of frames in which a thing's shape may look like another

# Hues in degrees of colours with a name, and the share of its bounding box that a shape fills with
# the height of its centroid in the box, 0 at the top.
_HUES = {"red": 0.0, "orange": 30.0, "yellow": 54.0, "green": 130.0, "blue": 225.0, "purple": 285.0}
_SHAPES = {
    "circle": (np.pi / 4, 0.5),
    "square": (1.0, 0.5),
    "triangle": (0.5, 2 / 3),
}
_MAX_MISFIT = 0.16  # in that plane


class Blob(NamedTuple):
    """Hold a thing of a frame; `shape` is "" if it looks like none. Pixels of _SIDE a side."""

    shape: str
    colour: str
    x: float
    y: float
    area: float


def find_blobs(frame: NDArray[np.uint8]) -> tuple[list[Blob], float]:
    """Return the things of a frame (n, n, 3), and the pixels of colour that belong to none."""
    scale = len(frame) / _SIDE
    pixels = frame.astype(np.float64)
    away = np.linalg.norm(pixels - np.median(pixels.reshape(-1, 3), axis=0), axis=-1)
    blobs, speckle = [], 0.0
    for part in connected_components(away >= _MIN_CONTRAST):
        if part.sum() < _MIN_AREA * scale**2:
            speckle += float(part.sum()) / scale**2
        else:
            blobs.append(_describe(pixels, away, part, scale))
    return blobs, speckle


def _describe(pixels: Floats, away: Floats, part: NDArray[np.bool_], scale: float) -> Blob:
    """Return the thing of a component; its edge pixels count by how far they are from the ground."""
    core = part & (away >= 0.8 * np.quantile(away[part], 0.8))
    full = float(np.median(away[core]))
    rows, columns = np.flatnonzero(part.any(axis=1)), np.flatnonzero(part.any(axis=0))
    top, left = max(rows[0] - 1, 0), max(columns[0] - 1, 0)
    near = away[top : rows[-1] + 2, left : columns[-1] + 2] / full
    share = np.where(near < 0.08, 0.0, np.minimum(near, 1.0))
    total = share.sum()
    y, x = (
        float((share.sum(axis=1 - axis) @ (np.arange(share.shape[axis]) + 0.5)) / total)
        for axis in (0, 1)
    )
    low, high = _edges(share.max(axis=1))
    first, last = _edges(share.max(axis=0))
    fill = total / ((high - low) * (last - first))
    height = (y - low) / (high - low)
    misfits = {
        shape: abs(fill - box) + abs(height - middle) for shape, (box, middle) in _SHAPES.items()
    }
    best = min(misfits, key=misfits.__getitem__)
    return Blob(
        best if misfits[best] <= _MAX_MISFIT else "",
        name_colour(np.median(pixels[core], axis=0)),
        (left + x) / scale,
        (top + y) / scale,
        float(total) / scale**2,
    )


def _edges(profile: Floats) -> tuple[float, float]:
    """Return where a profile of shares crosses a half, first and last, in fractions of a pixel.

    That is the edge of a shape, however soft.
    """
    padded = np.pad(profile, 1)
    inside = np.flatnonzero(padded >= 0.5)
    first, last = inside[0], inside[-1]
    low = first - (padded[first] - 0.5) / (padded[first] - padded[first - 1])
    high = last + (padded[last] - 0.5) / (padded[last] - padded[last + 1])
    return float(low - 0.5), float(high - 0.5)


def name_colour(pixel: Floats) -> str:
    """Return the name of a colour (3,), 0 to 255."""
    high, low = float(pixel.max()), float(pixel.min())
    if high < 80 or (high - low) < 0.25 * high:
        return "black"
    red, green, blue = (pixel - low) / (high - low)
    if red == 1:
        hue = 60 * ((green - blue) % 6)
    elif green == 1:
        hue = 60 * (blue - red + 2)
    else:
        hue = 60 * (red - green + 4)
    return min(_HUES, key=lambda name: abs((hue - _HUES[name] + 180) % 360 - 180))


def follow(film: Frames) -> tuple[list[list[Blob]], str]:
    """Return the things of a film, each frame by frame; or none, and why they cannot be followed.

    Raises RecipeError for another shape than (frames, n, n, 3).
    """
    if film.ndim != 4 or len(film) < 2 or film.shape[1] != film.shape[2] or film.shape[3] != 3:
        raise RecipeError(
            f"film has shape {film.shape}: give two square frames or more with three channels",
            param="film",
        )
    tracks: list[list[Blob]] = []
    for number, frame in enumerate(film):
        blobs, speckle = find_blobs(frame)
        if speckle > _MAX_SPECKLE:
            return [], f"{speckle:.0f} pixels of colour belong to no thing"
        if not number:
            tracks = [[blob] for blob in blobs]
            continue
        if len(blobs) != len(tracks):
            return [], f"{len(blobs)} things in a frame, {len(tracks)} in the first"
        for track in tracks:
            old = track[-1]
            own = [blob for blob in blobs if blob.colour == old.colour]
            if not own:
                return [], f"the {old.colour} thing does not stay"
            new = min(own, key=lambda blob: (blob.x - old.x) ** 2 + (blob.y - old.y) ** 2)
            track.append(new)
            blobs.remove(new)
    return tracks, ""


def motion_of(track: Sequence[Blob]) -> str:
    """Return the motion of a thing, or "" if it is none of the known ones."""
    first, last = track[0], track[-1]
    right, down = last.x - first.x, last.y - first.y
    if any(abs(b.x - a.x) + abs(b.y - a.y) > _MAX_JUMP for a, b in pairwise(track)):
        return ""
    if max(abs(right), abs(down)) < _STILL:
        change = last.area / first.area
        if change >= _GROWN or change <= 1 / _GROWN:
            return "grows" if change > 1 else "shrinks"
        return "still"
    along, across = max(abs(right), abs(down)), min(abs(right), abs(down))
    if along < _FAR or across > _MAX_SLANT * along:
        return ""
    if along == abs(right):
        return "right" if right > 0 else "left"
    return "down" if down > 0 else "up"


def shape_of(track: Sequence[Blob]) -> str:
    """Return the shape of a thing, or "" if it looks like another in too many frames."""
    shape, count = Counter(blob.shape for blob in track).most_common(1)[0]
    return shape if count >= (1 - _MAX_ODD_FRAMES) * len(track) else ""


def check(film: Frames, actors: Sequence[Actor]) -> CheckResult:
    """Return whether a film shows what a prompt says: these things, moving so, and no others."""
    tracks, problem = follow(film)
    if problem:
        return CheckResult(False, problem)
    if len(tracks) != len(actors):
        return CheckResult(False, f"{len(tracks)} things, not {len(actors)}")
    shown = [(shape_of(one), one[0].colour, motion_of(one)) for one in tracks]
    for found, wanted in zip(_by_kind(shown), _by_kind(actors), strict=True):
        if tuple(found) != tuple(wanted):
            return CheckResult(False, f"it shows {_phrase(found)}, not {_phrase(wanted)}")
    return CheckResult(True)


def _by_kind(things: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    return sorted(things, key=lambda one: (one[1], one[0], one[2]))


def _phrase(thing: tuple[str, str, str]) -> str:
    shape, colour, motion = thing
    return f"{colour} {shape or 'without a known shape'} {motion or 'in no known motion'}"
