"""The micro-world of coloured shapes: the one definition that every recipe shares.

A scene is up to four things on a small grid. This module samples scenes, puts them into words and asks
questions that have exactly one right answer. Conversations around a scene belong to the `chat_*` modules.

Directions: column 0 is the leftmost, row 0 the topmost. A thing without a size is of ordinary size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Literal, NamedTuple

SHAPES = ("circle", "square", "triangle", "star")
COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "black")
SIZES = ("small", "large")
RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *(
        "eleven",
        "twelve",
        "thirteen",
        "fourteen",
        "fifteen",
        "sixteen",
        "seventeen",
        "eighteen",
        "nineteen",
        "twenty",
    ),
)
MAX_THINGS = 4
GRID = 4

Arrangement = Literal["row", "column", "scatter"]
ARRANGEMENTS: tuple[Arrangement, ...] = ("row", "column", "scatter")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a thing looks like; None leaves a property open (no shape reads as "thing")."""

    shape: str | None = None
    colour: str | None = None
    size: str | None = None

    def matches(self, other: Kind) -> bool:
        """Whether `other` has every property that this kind names."""
        return (
            self.shape in (None, other.shape)
            and self.colour in (None, other.colour)
            and self.size in (None, other.size)
        )

    def phrase(self, *, plural: bool = False, anything: str = "thing") -> str:
        """The noun phrase without article: "small red circle", "red things"; `anything` stands for an open shape."""
        noun = (self.shape or anything) + ("s" if plural else "")
        return " ".join(word for word in (self.size, self.colour, noun) if word)


@dataclass(frozen=True, kw_only=True)
class Thing:
    """One shape on the grid. Source of truth for words and, later, for pixels."""

    shape: str
    colour: str
    size: str | None = None
    column: int = 0
    row: int = 0

    def __post_init__(self) -> None:
        _check("shape", self.shape, SHAPES)
        _check("colour", self.colour, COLOURS)
        if self.size is not None:
            _check("size", self.size, SIZES)
        if not (0 <= self.column < GRID and 0 <= self.row < GRID):
            raise ValueError(
                f"cell ({self.column}, {self.row}) is off the grid: use 0..{GRID - 1} for column and row"
            )

    @property
    def kind(self) -> Kind:
        return Kind(shape=self.shape, colour=self.colour, size=self.size)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Up to four things in distinct cells, in order of mention (rows: left to right, columns: top to bottom).

    Sampled scattered scenes share neither row nor column between things, so no part of one is a row or column.
    """

    things: tuple[Thing, ...]

    def __post_init__(self) -> None:
        if len(self.things) > MAX_THINGS:
            raise ValueError(
                f"a scene holds at most {MAX_THINGS} things, got {len(self.things)}: drop some"
            )
        if len({(thing.column, thing.row) for thing in self.things}) < len(self.things):
            raise ValueError("two things share a cell: give every thing a cell of its own")

    @property
    def arrangement(self) -> Arrangement:
        """A "row" or "column" has two or more things in reading order; everything else is "scatter"."""
        columns = [thing.column for thing in self.things]
        rows = [thing.row for thing in self.things]
        if len(self.things) > 1 and len(set(rows)) == 1 and columns == sorted(columns):
            return "row"
        if len(self.things) > 1 and len(set(columns)) == 1 and rows == sorted(rows):
            return "column"
        return "scatter"

    def find(self, kind: Kind) -> list[Thing]:
        return [thing for thing in self.things if kind.matches(thing.kind)]

    def groups(self) -> list[tuple[int, Kind]]:
        """Equal kinds counted together, in order of first mention."""
        counts: dict[Kind, int] = {}
        for thing in self.things:
            counts[thing.kind] = counts.get(thing.kind, 0) + 1
        return [(count, kind) for kind, count in counts.items()]


def holds(relation: str, thing: Thing, other: Thing) -> bool:
    """Whether `thing` is `relation` (left of, right of, above, below) `other`."""
    _check("relation", relation, RELATIONS)
    return {
        "left of": thing.column < other.column,
        "right of": thing.column > other.column,
        "above": thing.row < other.row,
        "below": thing.row > other.row,
    }[relation]


def _check(field: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{field} {value!r} is not of this world: use one of {', '.join(allowed)}")


# Sampling


def sample_kind(rng: Random, *, sized: float = 0.35) -> Kind:
    """A full kind (shape and colour); with probability `sized` it has a size."""
    size = rng.choice(SIZES) if rng.random() < sized else None
    return Kind(shape=rng.choice(SHAPES), colour=rng.choice(COLOURS), size=size)


def place(kind: Kind, column: int, row: int) -> Thing:
    """Put a full kind into a cell."""
    if kind.shape is None or kind.colour is None:
        raise ValueError(f"cannot place {kind.phrase()!r}: a thing needs a shape and a colour")
    return Thing(shape=kind.shape, colour=kind.colour, size=kind.size, column=column, row=row)


def sample_scene(
    rng: Random,
    *,
    arrangement: Arrangement | None = None,
    least: int = 1,
    most: int = MAX_THINGS,
    sized: float | None = None,
) -> Scene:
    """A random scene; rows and columns hold distinct kinds, scattered scenes often repeat one.

    `sized` is the share of things with a size; by default that differs from scene to scene.
    """
    layout: Arrangement = rng.choice(ARRANGEMENTS) if arrangement is None else arrangement
    count = rng.randint(max(least, 1 if layout == "scatter" else 2), max(most, 2))
    if layout == "scatter":
        count = min(count, most)
    kinds: list[Kind] = []
    sized = rng.choice((0.0, 0.3, 0.8)) if sized is None else sized
    while len(kinds) < count:
        if layout == "scatter" and kinds and rng.random() < 0.35:
            kinds.append(rng.choice(kinds))
        elif (kind := sample_kind(rng, sized=sized)) not in kinds:
            kinds.append(kind)
    kinds = sorted(
        kinds, key=kinds.index
    )  # equal kinds side by side, so that order of mention is order of things
    cells = _cells(rng, layout, count)
    return Scene(things=tuple(place(kind, *cell) for kind, cell in zip(kinds, cells, strict=True)))


def _cells(rng: Random, arrangement: Arrangement, count: int) -> list[tuple[int, int]]:
    line, fixed = sorted(rng.sample(range(GRID), count)), rng.randrange(GRID)
    if arrangement == "row":
        return [(column, fixed) for column in line]
    if arrangement == "column":
        return [(fixed, row) for row in line]
    return list(zip(rng.sample(range(GRID), count), rng.sample(range(GRID), count), strict=True))


# Words


def with_article(phrase: str) -> str:
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def counted(count: int, kind: Kind, *, digits: bool = False) -> str:
    """ "a red circle", "two red circles"; with `digits` "1 red circle", "2 red circles"."""
    if count == 1:
        return f"1 {kind.phrase()}" if digits else with_article(kind.phrase())
    return f"{count if digits else NUMBERS[count]} {kind.phrase(plural=True)}"


def listing(phrases: Sequence[str], *, last: str = " and ") -> str:
    """ "a, b and c"; an empty list reads "nothing"."""
    if not phrases:
        return "nothing"
    return last.join([", ".join(phrases[:-1]), phrases[-1]] if len(phrases) > 1 else phrases)


def inventory(scene: Scene, *, digits: bool = False) -> str:
    """What there is, without positions: "two red circles and a blue square"."""
    return listing([counted(count, kind, digits=digits) for count, kind in scene.groups()])


def canonical(scene: Scene) -> str:
    """The one sentence that answers "describe the scene"; rows and columns are told in order."""
    each = listing([with_article(thing.kind.phrase()) for thing in scene.things])
    if scene.arrangement == "row":
        return f"From left to right: {each}."
    if scene.arrangement == "column":
        return f"From top to bottom: {each}."
    return sentence(inventory(scene))


def sentence(text: str, end: str = ".") -> str:
    return text[:1].upper() + text[1:] + end


def describe(scene: Scene, rng: Random) -> str:
    """The scene in one of many phrasings. Rows and columns tell all positions, scattered scenes none."""
    if scene.arrangement == "scatter":
        return _describe_scattered(scene, rng)
    each = [with_article(thing.kind.phrase()) for thing in scene.things]
    start, end = ("left", "right") if scene.arrangement == "row" else ("top", "bottom")
    if rng.random() < 0.5:
        form = rng.choice(
            (
                "From {0} to {1}: {2}.",
                "From {0} to {1} there are {2}.",
                "I see, from {0} to {1}, {2}.",
                "The scene from {0} to {1}: {2}.",
                "There is a {3} of shapes: {2}, from {0} to {1}.",
            )
        )
        return form.format(start, end, listing(each), scene.arrangement)
    return " ".join(_pairwise(scene, rng))


def _describe_scattered(scene: Scene, rng: Random) -> str:
    things = inventory(scene, digits=rng.random() < 0.1)
    be = "are" if scene.groups()[:1] and scene.groups()[0][0] > 1 else "is"
    forms = (
        *(
            "There {0} {1}.",
            "There {0} {1}.",
            "There {0} {1} in the picture.",
            "In the scene there {0} {1}.",
        ),
        *(
            "I see {1}.",
            "I have {1}.",
            "The scene: {1}.",
            "The picture shows {1}.",
            "Imagine {1}.",
            "Look at {1}.",
        ),
        *("Scene: {1}.", "Here {0} {1}.", "You see {1}.", "{2}."),
    )
    return rng.choice(forms).format(be, things, sentence(things, ""))


def _pairwise(scene: Scene, rng: Random) -> Iterator[str]:
    """Neighbours related one sentence at a time: "A red circle is left of a blue square." """
    forward, backward = RELATIONS[:2] if scene.arrangement == "row" else RELATIONS[2:]
    known: set[Thing] = set()
    for first, second in pairwise(scene.things):
        relation, pair = (
            (forward, (first, second)) if rng.random() < 0.5 else (backward, (second, first))
        )
        words = [
            f"the {thing.kind.phrase()}" if thing in known else with_article(thing.kind.phrase())
            for thing in pair
        ]
        known.update(pair)
        yield sentence(f"{words[0]} is {relation} {words[1]}")


def name(thing: Thing, scene: Scene, rng: Random) -> str:
    """A definite phrase that fits this thing alone: "the star", "the red thing", "the small red circle".

    Raises ValueError if the scene holds two things of this kind.
    """
    options = [
        kind
        for kind in (
            Kind(shape=thing.shape),
            Kind(shape=thing.shape, colour=thing.colour),
            Kind(shape=thing.shape, colour=thing.colour),
            Kind(colour=thing.colour),
            thing.kind,
            thing.kind,
        )
        if len(scene.find(kind)) == 1
    ]
    if not options:
        raise ValueError(
            f"the scene has several of {thing.kind.phrase()!r}: no phrase names just one"
        )
    return "the " + rng.choice(options).phrase()


class Question(NamedTuple):
    """A question whose only right answer is `answer`, as a full sentence of the smallest size."""

    category: str
    text: str
    answer: str


def questions(scene: Scene, rng: Random) -> list[Question]:
    """One question of each category that this scene allows (see `world_questions.ASKERS`)."""
    from world_questions import ASKERS  # the askers build on this module

    asked = [asker(scene, rng) for asker in ASKERS.values()]
    return [question for question in asked if question]
