"""Define films of one to three moving shapes: sample them and word them as prompts.

Shapes and colours are some of the micro-world's. Lengths are pixels of a frame of SIZE pixels a
side, from its top left corner; times are frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import hypot
from random import Random
from typing import NamedTuple

from recipes.world.pictures import SIZE

FRAMES = 9
FRAME_RATE = 4.5
MAX_THINGS = 3
TRAVEL = (22.0, 34.0)  # of a thing that moves, from the first to the last frame
RADIUS = (5.5, 7.5)
GAP = 2.0  # smallest distance between the circles around two things
ROOM = 10.0  # distance between them from which on more is no better
MARGIN = 0.5  # smallest distance between a thing and the edge
_EXTENT = {"circle": 1.0, "square": 1.28, "triangle": 1.5}  # as they are drawn
_TRIES = 1000  # of placing things before others are sampled
_CHOICES = 24  # placements of which the best is taken
_SPREAD = 0.27  # of the frame between the places of two things on its diagonal, across and down
_DISTANCE_WEIGHT = 0.8  # of the distance from these places beside that between circles

DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}
MOTIONS = (*DIRECTIONS, "still")
SHAPES = ("circle", "square", "triangle")
COLOURS = ("red", "green", "blue", "yellow", "purple", "black")
_VERBS = {
    "right": ("moves from left to right", "moves to the right", "moves right", "goes right"),
    "left": ("moves from right to left", "moves to the left", "moves left", "goes left"),
    "down": ("moves from top to bottom", "moves down", "goes down", "falls"),
    "up": ("moves from bottom to top", "moves up", "goes up", "rises"),
    "still": ("stands still", "does not move", "stays where it is", "stays still"),
}
_FRAMINGS = ("a video of {0}", "a film of {0}", "{0}")
_LINKS = (", ", ", ", " and ", " while ")


class Actor(NamedTuple):
    """Hold what a prompt says of a thing: its shape, its colour and one of MOTIONS."""

    shape: str
    colour: str
    motion: str


class Course(NamedTuple):
    """Hold where a thing is in the first and in the last frame, and its radius.

    extent: of its shape from the middle, in radii.
    """

    start: tuple[float, float]
    end: tuple[float, float]
    radius: float
    extent: float

    @property
    def reach(self) -> float:
        """Return the radius of the circle around it."""
        return self.radius * self.extent

    @property
    def middle(self) -> tuple[float, float]:
        """Return the point halfway."""
        return self.at((FRAMES - 1) / 2)

    def at(self, frame: float) -> tuple[float, float]:
        """Return where its middle is in a frame."""
        share = frame / (FRAMES - 1)
        (x0, y0), (x1, y1) = self.start, self.end
        return x0 + share * (x1 - x0), y0 + share * (y1 - y0)


def canonical(actors: Sequence[Actor]) -> str:
    """Return the text that is equal for the same things in any order."""
    return ", ".join(sorted(" ".join(actor) for actor in actors))


def sample_actors(rng: Random) -> list[Actor]:
    """Return one to MAX_THINGS things, no two of which have both shape and colour in common."""
    count = rng.choices((1, 2, 3), (0.3, 0.4, 0.3))[0]
    kinds = rng.sample([(shape, colour) for shape in SHAPES for colour in COLOURS], count)
    return [Actor(shape, colour, rng.choice(MOTIONS)) for shape, colour in kinds]


def place(actors: Sequence[Actor], rng: Random) -> list[Course] | None:
    """Return a course for each thing, none of which touch; None if none was found.

    Of several placements it is the one with the most room in which the things lie nearest to the
    diagonal from the top left to the bottom right, in their order: a prompt then says much of where
    its things are, and a model need not choose among all the ways to arrange them.
    """
    found: list[list[Course]] = []
    for _ in range(_TRIES):
        courses: list[Course] = []
        for actor in actors:
            new = course(actor, rng)
            if any(_gap(new, other) < GAP for other in courses):
                break
            courses.append(new)
        else:
            found.append(courses)
            if len(found) == _CHOICES:
                break
    return max(found, key=_clarity, default=None)


def _clarity(courses: Sequence[Course]) -> float:
    """Return how clear an arrangement is: its least room, less the distances from the diagonal's places."""
    pairs = combinations(courses, 2)
    room = min((min(_gap(one, other), ROOM) for one, other in pairs), default=0.0)
    away = 0.0
    for number, one in enumerate(courses):
        place = SIZE * (0.5 + _SPREAD * (number - (len(courses) - 1) / 2))
        away += hypot(one.middle[0] - place, one.middle[1] - place)
    return room - _DISTANCE_WEIGHT * away / len(courses)


def course(actor: Actor, rng: Random) -> Course:
    """Return a course within the frame for a thing by itself."""
    radius, extent = rng.uniform(*RADIUS), _EXTENT[actor.shape]
    low, high = radius * extent + MARGIN, SIZE - radius * extent - MARGIN
    across, along = DIRECTIONS.get(actor.motion, (0, 0))
    travel = rng.uniform(*TRAVEL)
    x, y = (
        rng.uniform(low + max(0.0, -way * travel), high - max(0.0, way * travel))
        for way in (across, along)
    )
    end = (x + across * travel, y + along * travel)
    return Course((x, y), end, radius, extent)


def _gap(one: Course, other: Course) -> float:
    """Return the smallest distance in time between the circles around two things.

    The squared distance of their middles is a parabola over time: its lowest point decides.
    """
    x, y = one.start[0] - other.start[0], one.start[1] - other.start[1]
    vx, vy = one.end[0] - other.end[0] - x, one.end[1] - other.end[1] - y
    speed = vx * vx + vy * vy
    time = min(1.0, max(0.0, -(x * vx + y * vy) / speed)) if speed else 0.0
    return hypot(x + time * vx, y + time * vy) - one.reach - other.reach


def prompt(actors: Sequence[Actor], rng: Random) -> str:
    """Return words for a film, one clause for each thing."""
    clauses = [
        f"a {colour} {shape} {rng.choice(_VERBS[motion])}" for shape, colour, motion in actors
    ]
    text = clauses[0]
    for number, clause in enumerate(clauses[1:], 2):
        text += (" and " if number == 3 and rng.random() < 0.5 else rng.choice(_LINKS)) + clause
    if len(clauses) == 1 and rng.random() < 0.3:
        text = rng.choice(_FRAMINGS).format(text)
    text = text[0].upper() + text[1:] if rng.random() < 0.3 else text
    return text + "." if rng.random() < 0.3 else text
