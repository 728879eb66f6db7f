"""Make questions about a picture: those about described scenes, and positions in the picture.

A picture has no order of mention: `in_reading_order` gives it one, from left to right and from top
to bottom.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from recipes.world.questions import QUESTION_MAKERS, QuestionMaker, ask_horizontal, ask_vertical
from recipes.world.scenes import GRID, Question, Scene, Thing, definite_phrase

_ATTEMPTS = 12


def in_reading_order(scene: Scene) -> Scene:
    """Order things row by row, in columns from the top; equal things stay together."""
    things = sorted(scene.things, key=lambda thing: (thing.row, thing.column))
    ordered = Scene(things=tuple(things))
    if ordered.arrangement != "scatter":
        return ordered
    kinds = [thing.kind for thing in things]
    return Scene(things=tuple(sorted(things, key=lambda thing: kinds.index(thing.kind))))


def ask_where(scene: Scene, rng: Random) -> Question | None:
    """Ask for the quadrant of a thing: "Where is the star?" "At the top left"."""
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
    return Question(
        "where", rng.choice(forms).format(definite_phrase(thing, scene, rng)), quadrant(thing)
    )


def quadrant(thing: Thing) -> str:
    """Return the quadrant of the picture that a thing is in, as a sentence."""
    upright = "top" if thing.row < GRID // 2 else "bottom"
    aside = "left" if thing.column < GRID // 2 else "right"
    return f"At the {upright} {aside}."


def ask_left_right(scene: Scene, rng: Random) -> Question | None:
    """Ask about left and right, in rows and scattered scenes."""
    return _ask_order(_projected(scene, "row"), rng, ask_horizontal)


def ask_above_below(scene: Scene, rng: Random) -> Question | None:
    """Ask about above and below, in columns and scattered scenes."""
    return _ask_order(_projected(scene, "column"), rng, ask_vertical)


def _projected(scene: Scene, kept: str) -> Scene | None:
    """Project scattered things onto one row or column, in order; None if two coincide."""
    if len(scene.things) < 2 or scene.arrangement != "scatter":
        return scene
    in_row = kept == "row"
    pushed = [
        replace(thing, row=0) if in_row else replace(thing, column=0) for thing in scene.things
    ]
    if len({(thing.column, thing.row) for thing in pushed}) < len(pushed):
        return None
    return Scene(things=tuple(sorted(pushed, key=lambda thing: (thing.row, thing.column))))


def _ask_order(scene: Scene | None, rng: Random, make_question: QuestionMaker) -> Question | None:
    """Ask about the order of things; positions are left to `ask_where`."""
    for _ in range(_ATTEMPTS):
        question = make_question(scene, rng) if scene else None
        if question is None or not question.text.startswith("Where"):
            return question
    return None


VISUAL_QUESTION_MAKERS: dict[str, QuestionMaker] = {
    **QUESTION_MAKERS,
    "relation-horizontal": ask_left_right,
    "relation-vertical": ask_above_below,
    "where": ask_where,
}
