"""Write instructions that change a scene, and compute the scene that results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import NamedTuple

from recipes.world.scenes import (
    COLOURS,
    GRID,
    MAX_THINGS,
    SIZES,
    Kind,
    Scene,
    Thing,
    canonical,
    counted,
    definite_phrase,
    place,
    sample_kind,
)

FOLLOW_UPS = (
    "What is left?",
    "What is there now?",
    "Describe the scene.",
    "What do you see now?",
    "What do we have now?",
)


class Edit(NamedTuple):
    """Hold an instruction and the scene after it; the answer is `canonical(scene)`."""

    text: str
    scene: Scene

    @property
    def answer(self) -> str:
        """Return the description of the resulting scene."""
        return canonical(self.scene)


def _singles(scene: Scene) -> list[Thing]:
    return [thing for thing in scene.things if len(scene.find(thing.kind)) == 1]


def _swap_in(scene: Scene, old: Thing, new: Thing) -> Scene:
    return Scene(things=tuple(new if thing == old else thing for thing in scene.things))


def remove(scene: Scene, rng: Random) -> Edit | None:
    """Remove one thing, or all things of a shape or colour."""
    if not scene.things:
        return None
    if rng.random() < 0.3:
        thing = rng.choice(scene.things)
        kind = rng.choice((Kind(shape=thing.shape), Kind(colour=thing.colour), thing.kind))
        gone = scene.find(kind)
        if len(gone) > 1:
            what = rng.choice(
                (f"all {kind.phrase(plural=True)}", f"the {kind.phrase(plural=True)}")
            )
            return _removed(scene, what, gone, rng)
    singles = _singles(scene)
    if not singles:
        return None
    thing = rng.choice(singles)
    return _removed(scene, definite_phrase(thing, scene, rng), [thing], rng)


def _removed(scene: Scene, what: str, gone: list[Thing], rng: Random) -> Edit:
    verb = rng.choice(("Remove", "Remove", "Take away", "Delete", "Drop"))
    return Edit(
        f"{verb} {what}", Scene(things=tuple(thing for thing in scene.things if thing not in gone))
    )


def paint(scene: Scene, rng: Random) -> Edit | None:
    """Change the colour of one thing."""
    singles = _singles(scene)
    if not singles:
        return None
    thing = rng.choice(singles)
    colour = rng.choice([colour for colour in COLOURS if colour != thing.colour])
    verb = rng.choice(("Paint", "Paint", "Make", "Colour", "Turn"))
    text = f"{verb} {definite_phrase(thing, scene, rng)} {colour}"
    return Edit(text, _regroup(_swap_in(scene, thing, replace(thing, colour=colour))))


def resize(scene: Scene, rng: Random) -> Edit | None:
    """Make one thing small or large."""
    singles = _singles(scene)
    if not singles:
        return None
    thing = rng.choice(singles)
    size = rng.choice([size for size in SIZES if size != thing.size])
    return Edit(
        f"Make {definite_phrase(thing, scene, rng)} {size}",
        _regroup(_swap_in(scene, thing, replace(thing, size=size))),
    )


def add(scene: Scene, rng: Random) -> Edit | None:
    """Add one or two things to a scattered scene, or one at an end of a row or column."""
    free = MAX_THINGS - len(scene.things)
    if free < 1 or not scene.things:
        return None
    if scene.arrangement != "scatter":
        return _extend(scene, rng)
    kind = rng.choice(scene.things).kind if rng.random() < 0.2 else sample_kind(rng)
    count = rng.choice((1, 1, 2)) if free > 1 else 1
    columns = set(range(GRID)) - {thing.column for thing in scene.things}
    rows = set(range(GRID)) - {thing.row for thing in scene.things}
    cells = zip(rng.sample(sorted(columns), count), rng.sample(sorted(rows), count), strict=True)
    verb = rng.choice(("Add", "Add", "Put in", "Also add"))
    grown = Scene(things=scene.things + tuple(place(kind, *cell) for cell in cells))
    return Edit(f"{verb} {counted(count, kind)}", _regroup(grown))


def _extend(scene: Scene, rng: Random) -> Edit | None:
    kind = sample_kind(rng)
    if scene.find(kind):
        return None
    in_row, first = scene.arrangement == "row", rng.random() < 0.5
    where = {
        (True, True): "on the left",
        (True, False): "on the right",
        (False, True): "at the top",
    }
    kinds = (
        [kind, *(t.kind for t in scene.things)]
        if first
        else [*(t.kind for t in scene.things), kind]
    )
    things = tuple(place(k, i, 0) if in_row else place(k, 0, i) for i, k in enumerate(kinds))
    return Edit(
        f"Add {counted(1, kind)} {where.get((in_row, first), 'at the bottom')}",
        Scene(things=things),
    )


def swap(scene: Scene, rng: Random) -> Edit | None:
    """Exchange two things of a row or column."""
    if scene.arrangement == "scatter":
        return None
    singles = _singles(scene)
    if len(singles) < 2:
        return None
    first, second = rng.sample(singles, 2)
    moved = {
        first: replace(first, column=second.column, row=second.row),
        second: replace(second, column=first.column, row=first.row),
    }
    things = sorted(
        (moved.get(thing, thing) for thing in scene.things), key=lambda t: (t.row, t.column)
    )
    verb = rng.choice(("Swap", "Swap", "Exchange"))
    text = f"{verb} {definite_phrase(first, scene, rng)} and {definite_phrase(second, scene, rng)}"
    return Edit(text, Scene(things=tuple(things)))


def _regroup(scene: Scene) -> Scene:
    """Put equal kinds of a scattered scene side by side, so that words and things share an order."""
    if scene.arrangement != "scatter":
        return scene
    kinds = [thing.kind for thing in scene.things]
    return Scene(things=tuple(sorted(scene.things, key=lambda thing: kinds.index(thing.kind))))


EDITS: tuple[Callable[[Scene, Random], Edit | None], ...] = (
    remove,
    remove,
    paint,
    paint,
    add,
    resize,
    swap,
    swap,
)


def instruct(scene: Scene, rng: Random) -> Edit | None:
    """Return a random edit as one user sentence, with or without a follow-up question."""
    edit = rng.choice(EDITS)(scene, rng)
    if edit is None:
        return None
    draw = rng.random()
    if draw < 0.35:
        return edit._replace(text=f"{edit.text}.")
    if draw < 0.65:
        return edit._replace(text=f"{edit.text} and describe the scene.")
    return edit._replace(text=f"{edit.text}. {rng.choice(FOLLOW_UPS)}")
