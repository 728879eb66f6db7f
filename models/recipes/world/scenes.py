"""Define the micro-world of coloured shapes that every recipe shares.

A scene is up to four things on a small grid. This module samples scenes, describes them, and makes
questions with exactly one answer. Conversations around a scene belong to `recipes.chat`.

Directions: column 0 is the leftmost, row 0 the topmost. A thing without a size is of ordinary size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Literal, NamedTuple

from recipes.training.errors import RecipeError

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
MAX_THINGS = 4  # of a sampled scene
MAX_PICTURED = 6  # of any scene: pictures of other renderers show up to six
GRID = 4

Arrangement = Literal["row", "column", "scatter"]
ARRANGEMENTS: tuple[Arrangement, ...] = ("row", "column", "scatter")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Describe what a thing looks like; None leaves a property open."""

    shape: str | None = None
    colour: str | None = None
    size: str | None = None

    def matches(self, other: Kind) -> bool:
        """Return True if `other` has every property that this kind names."""
        return (
            self.shape in (None, other.shape)
            and self.colour in (None, other.colour)
            and self.size in (None, other.size)
        )

    def phrase(self, *, plural: bool = False, anything: str = "thing") -> str:
        """Return the noun phrase without article, as "small red circle"; `anything` is an open
        shape.
        """
        noun = (self.shape or anything) + ("s" if plural else "")
        return " ".join(word for word in (self.size, self.colour, noun) if word)


@dataclass(frozen=True, kw_only=True)
class Thing:
    """Hold one shape on the grid. Raises RecipeError for a property outside the micro-world."""

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
        for param, value in (("column", self.column), ("row", self.row)):
            if not 0 <= value < GRID:
                raise RecipeError(f"{param}={value}: use 0 to {GRID - 1}", param=param)

    @property
    def kind(self) -> Kind:
        """Return its kind."""
        return Kind(shape=self.shape, colour=self.colour, size=self.size)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Hold up to six things in distinct cells, in order of mention.

    Rows are ordered from left to right, columns from top to bottom. Sampled scattered scenes share
    neither row nor column between things, so that no part of one is a row or column.
    """

    things: tuple[Thing, ...]

    def __post_init__(self) -> None:
        if len(self.things) > MAX_PICTURED:
            raise RecipeError(
                f"things: {len(self.things)} given; a scene has at most {MAX_PICTURED}",
                param="things",
            )
        if len({(thing.column, thing.row) for thing in self.things}) < len(self.things):
            raise RecipeError("things: two share a cell; give each its own", param="things")

    @property
    def arrangement(self) -> Arrangement:
        """Return "row" or "column" for two or more things in reading order, else "scatter"."""
        columns = [thing.column for thing in self.things]
        rows = [thing.row for thing in self.things]
        if len(self.things) > 1 and len(set(rows)) == 1 and columns == sorted(columns):
            return "row"
        if len(self.things) > 1 and len(set(columns)) == 1 and rows == sorted(rows):
            return "column"
        return "scatter"

    def find(self, kind: Kind) -> list[Thing]:
        """Return the things of a kind."""
        return [thing for thing in self.things if kind.matches(thing.kind)]

    def groups(self) -> list[tuple[int, Kind]]:
        """Count equal kinds together, in order of first mention."""
        counts: dict[Kind, int] = {}
        for thing in self.things:
            counts[thing.kind] = counts.get(thing.kind, 0) + 1
        return [(count, kind) for kind, count in counts.items()]


def relation_holds(relation: str, thing: Thing, other: Thing) -> bool:
    """Return True if `thing` is `relation` (left of, right of, above, below) `other`."""
    _check("relation", relation, RELATIONS)
    return {
        "left of": thing.column < other.column,
        "right of": thing.column > other.column,
        "above": thing.row < other.row,
        "below": thing.row > other.row,
    }[relation]


def _check(param: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise RecipeError(f"{param}={value!r}: use one of {', '.join(allowed)}", param=param)


# Sampling


def sample_kind(rng: Random, *, sized: float = 0.35) -> Kind:
    """Draw a full kind (shape and colour); with probability `sized` it has a size."""
    size = rng.choice(SIZES) if rng.random() < sized else None
    return Kind(shape=rng.choice(SHAPES), colour=rng.choice(COLOURS), size=size)


def place(kind: Kind, column: int, row: int) -> Thing:
    """Put a full kind into a cell. Raises RecipeError for an open kind."""
    if kind.shape is None or kind.colour is None:
        raise RecipeError(
            f"kind={kind.phrase()!r}: a thing needs a shape and a colour", param="kind"
        )
    return Thing(shape=kind.shape, colour=kind.colour, size=kind.size, column=column, row=row)


def sample_scene(
    rng: Random,
    *,
    arrangement: Arrangement | None = None,
    min_things: int = 1,
    max_things: int = MAX_THINGS,
    sized: float | None = None,
) -> Scene:
    """Draw a scene; rows and columns have distinct kinds, scattered ones often repeat one.

    sized: share of things with a size; None draws it per scene.
    """
    layout: Arrangement = rng.choice(ARRANGEMENTS) if arrangement is None else arrangement
    count = rng.randint(max(min_things, 1 if layout == "scatter" else 2), max(max_things, 2))
    if layout == "scatter":
        count = min(count, max_things)
    kinds: list[Kind] = []
    sized = rng.choice((0.0, 0.3, 0.8)) if sized is None else sized
    while len(kinds) < count:
        if layout == "scatter" and kinds and rng.random() < 0.35:
            kinds.append(rng.choice(kinds))
        elif (kind := sample_kind(rng, sized=sized)) not in kinds:
            kinds.append(kind)
    kinds = sorted(
        kinds, key=kinds.index
    )  # equal kinds side by side, so that things are in order of mention
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
    """Prefix "a" or "an"."""
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def counted(count: int, kind: Kind, *, digits: bool = False) -> str:
    """Return "a red circle", "two red circles"; with `digits`, "1 red circle"."""
    if count == 1:
        return f"1 {kind.phrase()}" if digits else with_article(kind.phrase())
    return f"{count if digits else NUMBERS[count]} {kind.phrase(plural=True)}"


def listing(phrases: Sequence[str], *, last: str = " and ") -> str:
    """Join phrases as "a, b and c"; none gives "nothing"."""
    if not phrases:
        return "nothing"
    return last.join([", ".join(phrases[:-1]), phrases[-1]] if len(phrases) > 1 else phrases)


def inventory(scene: Scene, *, digits: bool = False) -> str:
    """List the things without positions: "two red circles and a blue square"."""
    return listing([counted(count, kind, digits=digits) for count, kind in scene.groups()])


def canonical(scene: Scene) -> str:
    """Return the one answer to "describe the scene"; rows and columns in order."""
    each = listing([with_article(thing.kind.phrase()) for thing in scene.things])
    if scene.arrangement == "row":
        return f"From left to right: {each}."
    if scene.arrangement == "column":
        return f"From top to bottom: {each}."
    return sentence(inventory(scene))


def sentence(text: str, end: str = ".") -> str:
    """Capitalize a text and end it."""
    return text[:1].upper() + text[1:] + end


def describe(scene: Scene, rng: Random) -> str:
    """Describe the scene in one of many ways; rows and columns with positions, scattered without."""
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
    """Relate neighbours in one sentence each: "A red circle is left of a blue square"."""
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


def definite_phrase(thing: Thing, scene: Scene, rng: Random) -> str:
    """Return a phrase for this thing alone: "the star", "the small red circle".

    Raises RecipeError if the scene has two things of this kind.
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
        raise RecipeError(
            f"thing: the scene has several of {thing.kind.phrase()!r}; no phrase names just one",
            param="thing",
        )
    return "the " + rng.choice(options).phrase()


class Question(NamedTuple):
    """Hold a question whose only correct answer is `answer`, as the shortest full sentence."""

    category: str
    text: str
    answer: str


def questions(scene: Scene, rng: Random) -> list[Question]:
    """Return one question of each category that this scene allows."""
    from recipes.world.questions import QUESTION_MAKERS  # it imports this module

    found = [make_question(scene, rng) for make_question in QUESTION_MAKERS.values()]
    return [question for question in found if question]
