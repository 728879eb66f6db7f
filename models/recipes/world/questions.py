"""Make questions about a scene, by category; None if the scene has no single answer.

Every answer follows from the words of `world.describe` alone. Relations are therefore asked only of
rows and columns, and only between things that a phrase can single out.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from recipes.world.scenes import (
    COLOURS,
    NUMBERS,
    SHAPES,
    SIZES,
    Kind,
    Question,
    Scene,
    Thing,
    canonical,
    definite_phrase,
    listing,
    relation_holds,
    sentence,
    with_article,
)

ANYTHING = ("thing", "thing", "shape", "object")


def _some_kind(scene: Scene, rng: Random, *, present: float) -> Kind:
    """Draw a partial kind to ask about; with probability `present`, of a thing in the scene."""
    keys = rng.choice(
        (
            ("shape",),
            ("shape",),
            ("colour",),
            ("shape", "colour"),
            ("shape", "colour"),
            ("size", "shape"),
        )
    )
    if scene.things and rng.random() < present:
        source = rng.choice(scene.things).kind
    else:
        source = Kind(shape=rng.choice(SHAPES), colour=rng.choice(COLOURS), size=rng.choice(SIZES))
        if scene.things and rng.random() < 0.5:  # share one property with a thing in the scene
            near = rng.choice(scene.things).kind
            source = Kind(shape=near.shape, colour=source.colour, size=source.size)
    return Kind(**{key: getattr(source, key) for key in keys})


def _unique(scene: Scene) -> list[Thing]:
    return [thing for thing in scene.things if len(scene.find(thing.kind)) == 1]


def ask_count(scene: Scene, rng: Random) -> Question:
    """Ask for a number: "How many circles are there?" "Two"."""
    kind = Kind() if rng.random() < 0.2 else _some_kind(scene, rng, present=0.75)
    forms = (
        "How many {0} are there?",
        "How many {0} are there?",
        "How many {0} do you see?",
        "Count the {0}.",
    )
    text = rng.choice((*forms, "How many {0} are in the scene?", "What is the number of {0}?"))
    count = len(scene.find(kind))
    what = kind.phrase(plural=True, anything=rng.choice(ANYTHING))
    return Question("count", text.format(what), sentence(NUMBERS[count] if count else "none"))


def ask_colour(scene: Scene, rng: Random) -> Question | None:
    """Ask for a colour: "What colour is the circle?" "Red."

    A shape that is absent is answered by "There is no circle".
    """
    colour = rng.choice(("colour", "colour", "color"))
    forms = (
        "What {0} is {1}?",
        "What {0} is {1}?",
        "Which {0} is {1}?",
        "Tell me the {0} of {1}.",
        "What {0} does {1} have?",
    )
    if rng.random() < 0.12:
        missing = [shape for shape in SHAPES if not scene.find(Kind(shape=shape))]
        if missing:
            shape = rng.choice(missing)
            return Question(
                "colour", rng.choice(forms).format(colour, f"the {shape}"), f"There is no {shape}."
            )
    options = [
        (kind, thing)
        for thing in scene.things
        for kind in (Kind(shape=thing.shape), Kind(shape=thing.shape, size=thing.size))
        if len(scene.find(kind)) == 1
    ]
    if not options:
        return None
    kind, thing = rng.choice(options)
    text = rng.choice(forms).format(colour, f"the {kind.phrase()}")
    return Question("colour", text, sentence(thing.colour))


def ask_shape(scene: Scene, rng: Random) -> Question | None:
    """Ask for a shape: "What shape is the red thing?" "A circle"."""
    options = [
        (kind, thing)
        for thing in scene.things
        for kind in (Kind(colour=thing.colour), Kind(colour=thing.colour, size=thing.size))
        if len(scene.find(kind)) == 1
    ]
    if not options:
        return None
    kind, thing = rng.choice(options)
    what = " ".join(word for word in (kind.size, kind.colour) if word)
    which = " and ".join(word for word in (kind.size, kind.colour) if word)
    forms = (
        "What shape is the {0} thing?",
        "What shape is the {0} one?",
        "Which shape is {1}?",
        "What is the {0} thing?",
    )
    return Question(
        "shape", rng.choice(forms).format(what, which), sentence(with_article(thing.shape))
    )


def ask_size(scene: Scene, rng: Random) -> Question | None:
    """Ask about sizes: "How big is the star?" "Large."; "Is the star small?" "No"."""
    sized = [thing for thing in _unique(scene) if thing.size]
    if not sized:
        return None
    thing = rng.choice(sized)
    draw = rng.random()
    if draw < 0.3 and len(scene.find(Kind(size=thing.size))) == 1:
        kind = Kind(shape=thing.shape, colour=thing.colour)
        text = rng.choice(("Which thing is {0}?", "What is {0}?", "Which one is {0}?")).format(
            thing.size
        )
        return Question("size", text, f"The {kind.phrase()}.")
    kinds = [
        Kind(shape=thing.shape),
        Kind(colour=thing.colour),
        Kind(shape=thing.shape, colour=thing.colour),
    ]
    fitting = [kind for kind in kinds if len(scene.find(kind)) == 1]
    if not fitting:
        return None
    who = f"the {rng.choice(fitting).phrase()}"
    if draw < 0.6:
        size = rng.choice(SIZES)
        return Question("size", f"Is {who} {size}?", "Yes." if size == thing.size else "No.")
    forms = (
        "How big is {0}?",
        "What size is {0}?",
        "How large is {0}?",
        "What is the size of {0}?",
    )
    return Question("size", rng.choice(forms).format(who), sentence(thing.size or ""))


def ask_existence(scene: Scene, rng: Random) -> Question:
    """Ask for existence: "Is there a red circle?" "Yes"."""
    kind = _some_kind(scene, rng, present=0.5)
    noun = rng.choice(ANYTHING)
    one, many = with_article(kind.phrase(anything=noun)), kind.phrase(plural=True, anything=noun)
    forms = (
        "Is there {0}?",
        "Is there {0}?",
        "Do you see {0}?",
        "Are there any {1}?",
        "Can you see {0}?",
        "Is there {0} in the scene?",
    )
    return Question(
        "existence", rng.choice(forms).format(one, many), "Yes." if scene.find(kind) else "No."
    )


def ask_horizontal(scene: Scene, rng: Random) -> Question | None:
    """Ask about left and right, in rows."""
    return _ask_relation(scene, rng, "relation-horizontal") if scene.arrangement == "row" else None


def ask_vertical(scene: Scene, rng: Random) -> Question | None:
    """Ask about above and below, in columns."""
    return _ask_relation(scene, rng, "relation-vertical") if scene.arrangement == "column" else None


_ENDS = {
    "row": (
        ("on the left", "on the far left", "leftmost"),
        ("on the right", "on the far right", "rightmost"),
    ),
    "column": (
        ("at the top", "at the very top", "topmost"),
        ("at the bottom", "at the very bottom", "lowest"),
    ),
}


def _ask_relation(scene: Scene, rng: Random, category: str) -> Question | None:
    singles = _unique(scene)
    if len(singles) < len(scene.things):
        return None
    relations = ("left of", "right of") if scene.arrangement == "row" else ("above", "below")
    first, second = rng.sample(singles, 2)
    relation = rng.choice(relations)
    draw = rng.random()
    if draw < 0.4:
        forms = ("Is {0} {1} {2}?", "Is {0} {1} {2}?", "Is it true that {0} is {1} {2}?")
        text = rng.choice(forms).format(
            definite_phrase(first, scene, rng), relation, definite_phrase(second, scene, rng)
        )
        return Question(
            category, text, "Yes." if relation_holds(relation, first, second) else "No."
        )
    if draw < 0.55:
        side = rng.randrange(2)
        text = rng.choice(("What is {0}?", "Which thing is {0}?")).format(
            rng.choice(_ENDS[scene.arrangement][side])
        )
        return Question(category, text, f"The {scene.things[-side].kind.phrase()}.")
    if draw < 0.7 and len(singles) == 2:
        true = next(r for r in relations if relation_holds(r, first, second))
        text = rng.choice(("Where is {0}?", "Where is {0}?", "Where do you see {0}?")).format(
            definite_phrase(first, scene, rng)
        )
        return Question(category, text, sentence(f"{true} the {second.kind.phrase()}"))
    found = [thing for thing in scene.things if relation_holds(relation, thing, second)]
    if len(found) > 1:
        return _ask_relation(scene, rng, category)
    text = rng.choice(("What is {0} {1}?", "Which thing is {0} {1}?", "What do you see {0} {1}?"))
    answer = f"The {found[0].kind.phrase()}." if found else "Nothing."
    return Question(category, text.format(relation, definite_phrase(second, scene, rng)), answer)


def ask_description(scene: Scene, rng: Random) -> Question:
    """Ask for a description, or for a list of colours or shapes."""
    draw = rng.random()
    if draw < 0.25 and scene.things:
        what = "colour" if draw < 0.12 else "shape"
        found = listing(list(dict.fromkeys(getattr(thing, what) for thing in scene.things)))
        text = rng.choice(("Which {0} are there?", "What {0} do you see?", "Which {0} do you see?"))
        return Question("description", text.format(what + "s"), sentence(found))
    forms = (
        "Describe the scene.",
        "What is there?",
        "What do you see?",
        "What is in the scene?",
        "Describe it.",
        "Tell me what you see.",
        "What is in the picture?",
        "List all things.",
    )
    return Question("description", rng.choice(forms), canonical(scene))


QuestionMaker = Callable[[Scene, Random], Question | None]
QUESTION_MAKERS: dict[str, QuestionMaker] = {
    "count": ask_count,
    "colour": ask_colour,
    "shape": ask_shape,
    "size": ask_size,
    "existence": ask_existence,
    "relation-horizontal": ask_horizontal,
    "relation-vertical": ask_vertical,
    "description": ask_description,
}
