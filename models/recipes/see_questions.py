"""Questions about a picture: those about a scene in words, and where things stand, which only a picture tells.

What a picture shows has no order of mention: `as_seen` gives it one, from left to right and from top to bottom.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from world import GRID, Question, Scene, Thing, name
from world_questions import ASKERS, Asker, ask_horizontal, ask_vertical

_TRIES = 12


def as_seen(scene: Scene) -> Scene:
    """The scene as its picture is told: row after row from the left, in columns from the top; equal things together."""
    things = sorted(scene.things, key=lambda thing: (thing.row, thing.column))
    seen = Scene(things=tuple(things))
    if seen.arrangement != "scatter":
        return seen
    kinds = [thing.kind for thing in things]
    return Scene(things=tuple(sorted(things, key=lambda thing: kinds.index(thing.kind))))


def ask_where(scene: Scene, rng: Random) -> Question | None:
    """ "Where is the star?" "At the top left." """
    singles = [thing for thing in scene.things if len(scene.find(thing.kind)) == 1]
    if not singles:
        return None
    thing = rng.choice(singles)
    forms = (
        "Where is {0}?",
        "Where is {0}?",
        "Where do you see {0}?",
        "Where in the picture is {0}?",
    )
    return Question("where", rng.choice(forms).format(name(thing, scene, rng)), corner(thing))


def corner(thing: Thing) -> str:
    """The quarter of the picture that a thing stands in, as a sentence."""
    upright = "top" if thing.row < GRID // 2 else "bottom"
    aside = "left" if thing.column < GRID // 2 else "right"
    return f"At the {upright} {aside}."


def ask_sideways(scene: Scene, rng: Random) -> Question | None:
    """Left and right, in rows and of scattered things."""
    return _ask_place(_flat(scene, "row"), rng, ask_horizontal)


def ask_upright(scene: Scene, rng: Random) -> Question | None:
    """Above and below, in columns and of scattered things."""
    return _ask_place(_flat(scene, "column"), rng, ask_vertical)


def _flat(scene: Scene, kept: str) -> Scene | None:
    """Scattered things pushed into one row or column, in order; None where two stand at one place of it."""
    if len(scene.things) < 2 or scene.arrangement != "scatter":
        return scene
    in_row = kept == "row"
    pushed = [
        replace(thing, row=0) if in_row else replace(thing, column=0) for thing in scene.things
    ]
    if len({(thing.column, thing.row) for thing in pushed}) < len(pushed):
        return None
    return Scene(things=tuple(sorted(pushed, key=lambda thing: (thing.row, thing.column))))


def _ask_place(scene: Scene | None, rng: Random, asker: Asker) -> Question | None:
    """A question about the order of things; where one stands, `ask_where` asks."""
    for _ in range(_TRIES):
        question = asker(scene, rng) if scene else None
        if question is None or not question.text.startswith("Where"):
            return question
    return None


VISUAL_ASKERS: dict[str, Asker] = {
    **ASKERS,
    "relation-horizontal": ask_sideways,
    "relation-vertical": ask_upright,
    "where": ask_where,
}
