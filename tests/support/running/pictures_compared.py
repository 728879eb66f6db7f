"""Compare screenshots with stored ones, within a tolerance for how edges of letters are smoothed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

BLOCK = 4  # pixels; blocks of as many squared are compared by their mean
MOST_OFF = 20  # of 255: a block differs if a channel of its mean is further off
TOLERANCE = 0.004  # share of blocks that may differ
COLOURS = 256  # of a stored picture, which keeps the files small


def difference(one: Image.Image, other: Image.Image) -> float:
    """Return the share of blocks that differ; 1 for pictures of different sizes."""
    if one.size != other.size:
        return 1.0
    a, b = (np.asarray(each.convert("RGB").reduce(BLOCK), np.int16) for each in (one, other))
    return float((np.abs(a - b).max(axis=2) > MOST_OFF).mean())


def store(picture: Image.Image, path: Path) -> None:
    """Write a screenshot for later comparisons."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
