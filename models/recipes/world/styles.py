"""Draw scenes as other programs might: any size, ground, hue, outline, edge and place in a cell.

`recipes.world.pictures` draws the micro-world's own pictures. This module draws by signed
distances instead, and shares no drawing code with it. The pictures of the held-out set come from a
third renderer, Pillow's, which draws nothing here (models/README.md).

Coordinates: x and y are shares of the picture's width and height; a radius is in units of a picture
of 64 pixels, as in `RADII`.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.world.pictures import SIZE, Floats, Picture
from recipes.world.scenes import GRID, Kind, Scene, Thing, place, sample_kind, sample_scene

Colour = tuple[float, float, float]  # red, green, blue from 0 to 255

# Ranges of radii by size; the gaps between them are never drawn, since no word fits there.
RADIUS_RANGES = {"small": (2.7, 3.7), None: (4.3, 5.3), "large": (6.0, 7.5)}
LARGEST = 22.0
LEAST_PIXELS = 2.7  # the least radius of a shape, in pixels
REACH = {"circle": 1.0, "square": 1.3, "triangle": 1.5, "star": 1.55}  # extent of each, in radii
CONTRAST = 80.0  # the least distance of a colour from the ground's

# Hue in degrees, saturation, value: (low, high) of each.
HUES: dict[str, tuple[tuple[float, float], tuple[float, float], tuple[float, float]]] = {
    "red": ((-14, 8), (0.75, 1.0), (0.65, 1.0)),
    "orange": ((21, 40), (0.8, 1.0), (0.88, 1.0)),
    "yellow": ((48, 61), (0.65, 1.0), (0.88, 1.0)),
    "green": ((90, 155), (0.45, 1.0), (0.38, 1.0)),
    "blue": ((203, 247), (0.6, 1.0), (0.45, 1.0)),
    "purple": ((266, 305), (0.5, 1.0), (0.38, 0.88)),
    "black": ((0, 360), (0.0, 0.3), (0.0, 0.14)),
}


class Figure(NamedTuple):
    """Hold a thing with its middle (shares of width and height), radius and turn in radians."""

    thing: Thing
    x: float
    y: float
    radius: float
    turn: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Style:
    """Define how a picture is drawn.

    proportional: a shape keeps its proportions in the picture, so that the model's square squeezes
    it; else it keeps them in that square. softness: width of an edge, in pixels; 0 is without
    anti-aliasing. outline: its width in units of the radius. roundness: radius of the corners, in
    radii. tip: inner radius of a star by its outer one. slope: height of a triangle, by its own.
    """

    width: int = SIZE
    height: int = SIZE
    proportional: bool = True
    softness: float = 1.0
    outline: float = 0.0
    roundness: float = 0.0
    tip: float = 0.42
    slope: float = 1.0

    @property
    def units(self) -> tuple[float, float]:
        """Return the pixels, across and down, of a radius of 1."""
        if self.proportional:
            side = float(np.sqrt(self.width * self.height)) / SIZE
            return side, side
        return self.width / SIZE, self.height / SIZE


# ------------------------------------------------------------------------------------------------------------ shapes
def corners(shape: str, style: Style) -> NDArray[np.float64]:
    """Return the corners `[N, 2]` of a shape of radius 1; a circle has none."""
    if shape == "square":
        return np.array([(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)])
    if shape == "triangle":
        return np.array([(0.0, -1.35), (1.2, 0.8), (-1.2, 0.8)]) * (1.0, style.slope)
    if shape == "star":
        turns = np.arange(10) * np.pi / 5
        reach = np.where(np.arange(10) % 2 == 0, 1.5, 1.5 * style.tip)
        return np.stack([reach * np.sin(turns), -reach * np.cos(turns)], axis=1)
    return np.zeros((0, 2))


def distance(shape: str, x: Floats, y: Floats, style: Style) -> Floats:
    """Return the signed distance of points from a shape of radius 1; negative inside."""
    points = corners(shape, style)
    if not len(points):
        return np.hypot(x, y) - 1.0
    points = points * (1.0 - style.roundness)
    following = np.roll(points, -1, axis=0)
    (x0, y0), (x1, y1) = points.T[..., None, None], following.T[..., None, None]
    dx, dy = x1 - x0, y1 - y0
    right, down = x - x0, y - y0
    along = np.clip((right * dx + down * dy) / (dx * dx + dy * dy), 0.0, 1.0)
    nearest = ((right - along * dx) ** 2 + (down - along * dy) ** 2).min(axis=0)
    crossed = ((y0 > y) != (y1 > y)) & (right > dx * down / np.where(dy == 0.0, 1.0, dy))
    inside = crossed.sum(axis=0) % 2 == 1  # even-odd rule with a ray to the left
    return np.where(inside, -1.0, 1.0) * np.sqrt(nearest) - style.roundness


def paint(canvas: Floats, figure: Figure, fill: Colour, line: Colour, style: Style) -> None:
    """Paint a figure onto a canvas `[H, W, 3]`."""
    height, width = canvas.shape[:2]
    scale_x, scale_y = (figure.radius * unit for unit in style.units)
    middle_x, middle_y = figure.x * width, figure.y * height
    reach = 1.75 + style.outline
    left, right = _clip(middle_x, reach * scale_x, width)
    top, bottom = _clip(middle_y, reach * scale_y, height)
    x = ((np.arange(left, right) + 0.5 - middle_x) / scale_x)[None, :]
    y = ((np.arange(top, bottom) + 0.5 - middle_y) / scale_y)[:, None]
    cosine, sine = np.cos(figure.turn), np.sin(figure.turn)
    far = distance(figure.thing.shape, cosine * x + sine * y, cosine * y - sine * x, style)
    pixels = far * np.sqrt(scale_x * scale_y)
    part = canvas[top:bottom, left:right]
    part += _share(pixels, style.softness)[..., None] * (np.array(fill) - part)
    if style.outline:
        edge = np.abs(pixels) - max(style.outline * np.sqrt(scale_x * scale_y), 1.0) / 2
        part += _share(edge, style.softness)[..., None] * (np.array(line) - part)


def _share(pixels: Floats, softness: float) -> Floats:
    """Return the share of a pixel that is painted, from its distance to the edge."""
    if not softness:
        return (pixels < 0.0).astype(float)
    return np.clip(0.5 - pixels / softness, 0.0, 1.0)


def _clip(middle: float, reach: float, size: int) -> tuple[int, int]:
    return (
        min(max(int(np.floor(middle - reach)), 0), size),
        min(max(int(np.ceil(middle + reach)), 0), size),
    )


# ----------------------------------------------------------------------------------------------------------- colours
def hue(name: str, rng: Random) -> Colour:
    """Return some colour of this name."""
    angle, saturation, value = (rng.uniform(*each) for each in HUES[name])
    if rng.random() < 0.4:  # programs have plain names for fully saturated colours
        saturation = HUES[name][1][1]
    red, green, blue = colorsys.hsv_to_rgb(angle / 360 % 1.0, saturation, value)
    return 255 * red, 255 * green, 255 * blue


def ground(rng: Random, width: int, height: int) -> Floats:
    """Return a canvas `[H, W, 3]`: white, grey, coloured, a gradient or noise."""
    draw = rng.random()
    grain = np.random.default_rng(rng.getrandbits(32))
    if draw < 0.35:
        return np.full((height, width, 3), 255.0)
    if draw < 0.55:
        return np.full((height, width, 3), rng.uniform(200, 255))
    if draw < 0.65:
        return np.full((height, width, 3), rng.uniform(30, 200))
    if draw < 0.85:
        return np.broadcast_to(_any_colour(rng), (height, width, 3)).copy()
    if draw < 0.95:
        first, second = _any_colour(rng), _any_colour(rng)
        across = np.linspace(0.0, 1.0, width)[None, :] * rng.choice((0.0, 1.0))
        down = np.linspace(0.0, 1.0, height)[:, None] * rng.choice((0.0, 1.0))
        share = ((across + down) / 2)[..., None]
        return first + share * (second - first)
    canvas = np.full((height, width, 3), rng.uniform(120, 255))
    return np.clip(canvas + grain.normal(0.0, rng.uniform(3, 20), canvas.shape), 0, 255)


def _any_colour(rng: Random) -> Floats:
    """Return a pale colour mostly, else any."""
    saturation = rng.uniform(0.05, 0.35) if rng.random() < 0.75 else rng.uniform(0.35, 1.0)
    value = rng.uniform(0.8, 1.0) if rng.random() < 0.75 else rng.uniform(0.2, 0.8)
    return 255 * np.array(colorsys.hsv_to_rgb(rng.random(), saturation, value))


def _apart(canvas: Floats, colour: Colour) -> bool:
    """Return True if a colour stands out from all of a ground."""
    spots = canvas[:: max(len(canvas) // 4, 1), :: max(canvas.shape[1] // 4, 1)].reshape(-1, 3)
    return float(np.linalg.norm(spots - np.array(colour), axis=1).min()) >= CONTRAST


# ------------------------------------------------------------------------------------------------------------ scenes
class Slant(NamedTuple):
    """Hold the shares of pictures that are of a harder kind.

    many: of four to six things. small: of about 20 to 40 pixels.
    """

    many: float = 0.0
    small: float = 0.0


EVEN = Slant()


def sample_pictured_scene(rng: Random, *, many_share: float = 0.0) -> Scene:
    """Sample a scene of one to six things.

    About a third come from `sample_scene`; the things of the others are mostly large. many_share: of
    scenes of four to six things.
    """
    many = bool(many_share) and rng.random() < many_share
    if not many and rng.random() < 0.35:
        return sample_scene(rng, sized=rng.choice((0.3, 0.9, 1.0)))
    few = (1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 5, 6, 6)
    count = rng.choice((4, 5, 5, 6, 6, 6) if many else few)
    large = rng.choice((0.0, 0.5, 1.0, 1.0, 1.0)) if count < 5 else rng.choice((0.0, 0.3, 0.8))
    kinds: list[Kind] = []
    while len(kinds) < count:
        repeated = kinds and rng.random() < 0.2
        kind = rng.choice(kinds) if repeated else sample_kind(rng, sized=0.35)
        size = "large" if rng.random() < large else kind.size
        kinds.append(kind if repeated else Kind(shape=kind.shape, colour=kind.colour, size=size))
    if count < 5 and rng.random() < 0.5:
        layout = rng.choice(("row", "column"))
        if count > 1 and len(set(kinds)) == count:
            line, fixed = sorted(rng.sample(range(GRID), count)), rng.randrange(GRID)
            cells = [(at, fixed) if layout == "row" else (fixed, at) for at in line]
            return Scene(things=tuple(place(k, *c) for k, c in zip(kinds, cells, strict=True)))
    spots = rng.sample(range(GRID * GRID), count)
    return Scene(
        things=tuple(
            place(kind, spot % GRID, spot // GRID) for kind, spot in zip(kinds, spots, strict=True)
        )
    )


# ------------------------------------------------------------------------------------------------------------ layout
def arrange(
    things: Sequence[Thing], rng: Random, style: Style, *, anywhere: bool = False
) -> list[Figure] | None:
    """Place things without overlap, each inside its cell or anywhere; None if they find no room.

    Things that stand anywhere get new cells, by `own_cells`.
    """
    most = LARGEST / RADIUS_RANGES["large"][0] if len(things) < 5 else 2.0
    factor = rng.uniform(1.0, most)
    turn = rng.choice((0.0, 0.0, rng.uniform(-0.2, 0.2)))
    for _ in range(10):
        figures: list[Figure] = []
        for thing in things:
            figure = _placed(thing, rng, style, factor, turn, anywhere=anywhere)
            if figure is None or _overlaps(figure, figures, style):
                break
            figures.append(figure)
        else:
            return own_cells(figures) if anywhere else figures
        factor = max(1.0, factor * 0.8)
    return None


def _placed(
    thing: Thing, rng: Random, style: Style, factor: float, turn: float, *, anywhere: bool
) -> Figure | None:
    least = LEAST_PIXELS / min(style.units)
    low, high = RADIUS_RANGES[thing.size]
    if thing.size == "large":
        high = max(high, high * factor)
    radius = rng.uniform(low, high)
    if radius < least:
        radius = rng.uniform(least, max(high, least))
    if radius > high and thing.size != "large":
        return None
    spots = []
    for cell, reach in zip((thing.column, thing.row), reaches(thing, radius, style), strict=True):
        start = reach if anywhere else max(cell / GRID, reach)
        end = 1.0 - reach if anywhere else min((cell + 1) / GRID, 1.0 - reach)
        if start > end:
            return None
        spots.append(rng.uniform(start, end))
    return Figure(thing, spots[0], spots[1], radius, turn)


def reaches(thing: Thing, radius: float, style: Style) -> tuple[float, float]:
    """Return how far a thing reaches across and down, as shares of the picture; at most a half."""
    reach = radius * REACH[thing.shape]
    across, down = style.units
    margin = 0.5 / SIZE
    return (
        min(reach * across / style.width + margin, 0.5),
        min(reach * down / style.height + margin, 0.5),
    )


def _overlaps(figure: Figure, others: Sequence[Figure], style: Style) -> bool:
    across, down = style.width / style.units[0], style.height / style.units[1]
    return any(
        np.hypot((figure.x - other.x) * across, (figure.y - other.y) * down)
        < 0.85
        * (figure.radius * REACH[figure.thing.shape] + other.radius * REACH[other.thing.shape])
        for other in others
    )


def own_cells(figures: Sequence[Figure]) -> list[Figure]:
    """Give each figure the nearest cell, those first that are nearest to the middle of theirs.

    Two figures may stand in one cell; the second gets the nearest free one.
    """
    free = [(column, row) for row in range(GRID) for column in range(GRID)]

    def far(figure: Figure, cell: tuple[int, int]) -> float:
        return (figure.x * GRID - cell[0] - 0.5) ** 2 + (figure.y * GRID - cell[1] - 0.5) ** 2

    found: dict[int, Figure] = {}
    for number in sorted(
        range(len(figures)), key=lambda one: min(far(figures[one], cell) for cell in free)
    ):
        figure = figures[number]
        cell = min(free, key=lambda each: far(figure, each))
        free.remove(cell)
        found[number] = figure._replace(thing=place(figure.thing.kind, *cell))
    return [found[number] for number in range(len(figures))]


def in_own_cell(figure: Figure) -> bool:
    """Return True if a figure's middle is in the cell that it has."""
    thing = figure.thing
    return (int(figure.x * GRID), int(figure.y * GRID)) == (thing.column, thing.row)


# --------------------------------------------------------------------------------------------------------- pictures
def sample_style(rng: Random, *, small_share: float = 0.0) -> Style:
    """Draw a style; two of five pictures have about as many pixels as the model sees.

    small_share: of pictures of about 20 to 40 pixels, whose shorter side may have 16.
    """
    least = 24
    if small_share and rng.random() < small_share:
        side, least = 20 * 2 ** rng.random(), 16
    else:
        side = _side(rng)
    aspect = 1.0 if rng.random() < 0.5 else 2.0 ** rng.uniform(-0.8, 0.8)
    return Style(
        width=min(max(round(side * aspect**0.5), least), 1024),
        height=min(max(round(side / aspect**0.5), least), 1024),
        proportional=rng.random() < 0.85,
        softness=rng.choice((0.0, 1.0, 1.0, rng.uniform(1.0, 2.0))),
        outline=rng.uniform(0.08, 0.35) if rng.random() < 0.35 else 0.0,
        roundness=rng.uniform(0.0, 0.12) if rng.random() < 0.2 else 0.0,
        tip=rng.uniform(0.34, 0.52),
        slope=rng.uniform(0.85, 1.2),
    )


def _side(rng: Random) -> float:
    draw = rng.random()
    if draw < 0.4:
        return float(SIZE)
    if draw < 0.75:
        return 24 * (96 / 24) ** rng.random()
    if draw < 0.99:
        return 96 * (240 / 96) ** rng.random()
    return 240 * (1024 / 240) ** rng.random()


class Drawing(NamedTuple):
    """Hold a picture and the figures on it, in the order of the scene."""

    picture: Picture
    figures: tuple[Figure, ...]


def styled_picture(
    things: Sequence[Thing], rng: Random, *, anywhere: bool = False, small_share: float = 0.0
) -> Drawing | None:
    """Draw things in a random style; None if they find no room or no ground that suits them.

    anywhere: place them regardless of their cells, and give them new ones.
    """
    style = sample_style(rng, small_share=small_share)
    figures = arrange(things, rng, style, anywhere=anywhere)
    if figures is None:
        return None
    fixed = {thing.colour: hue(thing.colour, rng) for thing in things}
    fills = [
        fixed[thing.colour] if rng.random() < 0.8 else hue(thing.colour, rng) for thing in things
    ]
    for _ in range(6):
        canvas = ground(rng, style.width, style.height)
        if all(_apart(canvas, fill) for fill in fills):
            break
    else:
        return None
    shade = rng.choice((0.0, 0.0, 255.0, 90.0, -1.0))
    for figure, fill in zip(figures, fills, strict=True):
        darker = (0.5 * fill[0], 0.5 * fill[1], 0.5 * fill[2])
        line = darker if shade < 0 or figure.thing.colour == "black" else (shade, shade, shade)
        paint(canvas, figure, fill, line, style)
    return Drawing(np.rint(np.clip(canvas, 0, 255)).astype(np.uint8), tuple(figures))
