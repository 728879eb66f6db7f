"""What pocket-embed learns from: the same said in two ways, and what differs from it in one thing.

A case is a function of (seed, index). Scenes of the micro-world are told twice, and a third time with one attribute of
one thing changed; general sentences are written in another way, and once more with another word in place of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import blake2b
from random import Random
from typing import NamedTuple

from speech_general import general
from speech_lexicon import number, words
from world import (
    COLOURS,
    NUMBERS,
    SHAPES,
    SIZES,
    Scene,
    Thing,
    canonical,
    describe,
    inventory,
    listing,
    sample_scene,
    sentence,
    with_article,
)

HELD_OUT_SEEDS = range(900_000_000, 1_000_000_000)
HELD_OUT_SHARE = 16  # one scene, and one sentence, in so many is held out
WORLD_SHARE = 0.6

_CONTRACTIONS = (
    *(
        ("do not", "don't"),
        ("does not", "doesn't"),
        ("did not", "didn't"),
        ("is not", "isn't"),
        ("cannot", "can't"),
    ),
    *(
        ("would not", "wouldn't"),
        ("should not", "shouldn't"),
        ("could not", "couldn't"),
        ("will not", "won't"),
    ),
    *(
        ("let us", "let's"),
        ("it is", "it's"),
        ("I am", "I'm"),
        ("he is", "he's"),
        ("she is", "she's"),
    ),
    *(("you are", "you're"), ("we are", "we're"), ("they are", "they're"), ("what is", "what's")),
)
_SYNONYMS = (
    *(
        ("big", "large"),
        ("little", "small"),
        ("begin", "start"),
        ("began", "started"),
        ("quick", "fast"),
    ),
    *(
        ("maybe", "perhaps"),
        ("everybody", "everyone"),
        ("somebody", "someone"),
        ("nobody", "no one"),
    ),
    *(
        ("before", "earlier than"),
        ("near", "close to"),
        ("behind", "at the back of"),
        ("because", "since"),
    ),
    *(
        ("although", "even though"),
        ("many", "a lot of"),
        ("often", "frequently"),
        ("glad", "happy"),
    ),
    *(("must", "have to"), ("beautiful", "pretty"), ("quite", "rather"), ("later", "afterwards")),
)
_LEADS = ("well, {0}", "oh, {0}", "look, {0}", "you know, {0}", "listen, {0}")


class Case(NamedTuple):
    """Two texts that say the same, and one that nearly does."""

    kind: str  # "world" | "general"
    text: str
    same: str
    near: str


# ----------------------------------------------------------------------------------------------------------- scenes
def told(scene: Scene, rng: Random) -> str:
    """A scene in one of many ways. Rows and columns tell all positions, scattered scenes none."""
    draw = rng.random()
    if draw < 0.45:
        return _cased(describe(scene, rng), rng)
    if draw < 0.55:
        return _cased(canonical(scene), rng)
    if scene.arrangement == "scatter":
        things = list(scene.things)
        rng.shuffle(things)
        mixed = Scene(
            things=tuple(
                sorted(things, key=lambda thing: [one.kind for one in things].index(thing.kind))
            )
        )
        form = rng.choice(
            (
                "{0}",
                "there is {0}",
                "I see {0}",
                "a picture of {0}",
                "{0} on a light ground",
                "here: {0}",
            )
        )
        return _cased(sentence(form.format(inventory(mixed, digits=rng.random() < 0.2))), rng)
    return _cased(_reversed(scene, rng), rng)


def _reversed(scene: Scene, rng: Random) -> str:
    """A row from right to left, a column from the bottom to the top."""
    start, end = ("right", "left") if scene.arrangement == "row" else ("bottom", "top")
    each = listing([with_article(thing.kind.phrase()) for thing in reversed(scene.things)])
    form = rng.choice(
        ("From {0} to {1}: {2}.", "From {0} to {1} there are {2}.", "I see, from {0} to {1}, {2}.")
    )
    return form.format(start, end, each)


def _cased(text: str, rng: Random) -> str:
    return text.lower().rstrip(".") if rng.random() < 0.3 else text


def altered(scene: Scene, rng: Random) -> Scene:
    """The scene with one difference: a colour, a shape, a size, a thing more or less, or two that changed places."""
    changes: list[Callable[[Scene, Random], Scene | None]] = [
        _repainted,
        _reshaped,
        _resized,
        _without,
    ]
    changes += [_swapped] * (2 * (scene.arrangement != "scatter"))
    while True:
        made = rng.choice(changes)(scene, rng)
        if made is not None and _meaning(made) != _meaning(scene):
            return made


def _with(scene: Scene, place: int, thing: Thing) -> Scene:
    return Scene(things=(*scene.things[:place], thing, *scene.things[place + 1 :]))


def _repainted(scene: Scene, rng: Random) -> Scene:
    place = rng.randrange(len(scene.things))
    return _with(scene, place, replace(scene.things[place], colour=rng.choice(COLOURS)))


def _reshaped(scene: Scene, rng: Random) -> Scene:
    place = rng.randrange(len(scene.things))
    return _with(scene, place, replace(scene.things[place], shape=rng.choice(SHAPES)))


def _resized(scene: Scene, rng: Random) -> Scene:
    place = rng.randrange(len(scene.things))
    return _with(scene, place, replace(scene.things[place], size=rng.choice((None, *SIZES))))


def _without(scene: Scene, rng: Random) -> Scene | None:
    if len(scene.things) < 2:
        return None
    place = rng.randrange(len(scene.things))
    return Scene(things=scene.things[:place] + scene.things[place + 1 :])


def _swapped(scene: Scene, rng: Random) -> Scene:
    one, two = rng.sample(range(len(scene.things)), 2)
    first, second = scene.things[one], scene.things[two]
    moved = (
        replace(first, column=second.column, row=second.row),
        replace(second, column=first.column, row=first.row),
    )
    things = list(scene.things)
    things[one], things[two] = moved[1], moved[0]
    return Scene(things=tuple(things))


def _meaning(scene: Scene) -> tuple[object, ...]:
    """Equal for scenes that words do not tell apart."""
    kinds = [str(thing.kind) for thing in scene.things]
    ordered = scene.arrangement != "scatter"
    return (scene.arrangement if ordered else "scatter", *(kinds if ordered else sorted(kinds)))


# ------------------------------------------------------------------------------------------------- general sentences
def rewritten(text: str, rng: Random) -> str:
    """The sentence in other words, letters or signs, saying what it said."""
    pairs = [
        pair
        for pair in (*_CONTRACTIONS, *_SYNONYMS)
        if re.search(rf"\b{pair[0]}\b", text, re.IGNORECASE)
    ]
    for old, new in rng.sample(pairs, min(len(pairs), rng.randint(1, 3))):
        text = re.sub(rf"\b{old}\b", new, text, flags=re.IGNORECASE)
    if rng.random() < 0.5:
        text = re.sub(r"\b[a-z]+\b", lambda match: _digits(match[0]), text)
    if rng.random() < 0.3:
        text = rng.choice(_LEADS).format(text)
    if (
        halves := re.fullmatch(
            r"(.+?),? (because|when|while|although|if|unless|after|before) (.+)\.", text
        )
    ) and (rng.random() < 0.6):
        text = f"{halves[2]} {halves[3]}, {halves[1]}."
    draw = rng.random()
    if draw < 0.35:
        text = text.lower()
    elif draw < 0.5:
        text = text.upper()
    return text.rstrip(".") if rng.random() < 0.4 else text


def _digits(word: str) -> str:
    return str(NUMBERS.index(word)) if word in NUMBERS else word


def exchanged(text: str, rng: Random) -> str | None:
    """The sentence with another word of its kind in place of one; None where it has none to exchange."""
    kinds = (
        "person",
        "animal",
        "thing",
        "place",
        "abstract",
        "food",
        "body",
        "adjective",
        "name",
        "city",
        "weekday",
    )
    known = {word: kind for kind in kinds for word in words(kind)}
    places = [match for match in re.finditer(r"[A-Za-z]+", text) if match[0] in known]
    if not places:
        return None
    match = rng.choice(places)
    others = [word for word in words(known[match[0]]) if word != match[0]]
    return text[: match.start()] + rng.choice(others) + text[match.end() :]


# ------------------------------------------------------------------------------------------------------------- cases
def _is_held_out(key: str) -> bool:
    return (
        int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") % HELD_OUT_SHARE == 0
    )


def world_case(rng: Random, *, held_out: bool) -> Case:
    while True:
        scene = sample_scene(rng, least=2)
        near = altered(scene, rng)
        keys = ["/".join(map(str, _meaning(one))) for one in (scene, near)]
        if _is_held_out(keys[0]) == held_out and (held_out or not _is_held_out(keys[1])):
            break
    text = told(scene, rng)
    return Case("world", text, _otherwise(text, lambda: told(scene, rng)), told(near, rng))


def general_case(rng: Random, *, held_out: bool) -> Case:
    while True:
        text = general(rng)
        near = exchanged(text, rng)
        if near is not None and len(text.split()) > 2 and _is_held_out(text.lower()) == held_out:
            break
    return Case(
        "general", text, _otherwise(text, lambda: rewritten(text, rng)), rewritten(near, rng)
    )


def _otherwise(text: str, again: Callable[[], str]) -> str:
    """Another wording, if a few attempts find one."""
    for _ in range(8):
        if (other := again()) != text:
            break
    return other


def case(seed: int, index: int) -> Case:
    """A case to learn from. ValueError for seeds that are held out."""
    if seed in HELD_OUT_SEEDS:
        raise ValueError(f"seed {seed} is held out: train with another one")
    rng = Random(f"embed/{seed}/{index}")
    return (world_case if rng.random() < WORLD_SHARE else general_case)(rng, held_out=False)


def held_out(kind: str, count: int) -> Iterator[Case]:
    """Cases whose scenes and sentences no training has seen."""
    make = {"world": world_case, "general": general_case}[kind]
    for seed in HELD_OUT_SEEDS[:count]:
        yield make(Random(f"embed/{seed}"), held_out=True)


def vocabulary() -> list[str]:
    """Texts with every word that there is, so that a tokenizer has seen them all."""
    return [
        *words(*_sections()),
        *(number(value) for value in range(100)),
        *COLOURS,
        *SHAPES,
        *SIZES,
    ]


def _sections() -> tuple[str, ...]:
    from speech_lexicon import sections

    return tuple(name for name in sections() if name != "irregular")
