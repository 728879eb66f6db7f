"""Make pocket-embed triplets: an anchor, a paraphrase, and a text that differs in one fact.

A triplet is a function of (seed, index). Scenes of the micro-world are described twice, and a third
time with one attribute changed; general sentences are paraphrased, and once more with one word
replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import NamedTuple

from recipes.speech.general import general
from recipes.speech.lexicon import number, words
from recipes.training.held_out_seeds import HELD_OUT_SEEDS, check_training_seed, in_held_out_share
from recipes.world.scenes import (
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

HELD_OUT_SHARE = 16  # one scene or sentence in HELD_OUT_SHARE is held out
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


class Triplet(NamedTuple):
    """Hold two texts of one meaning, and a hard negative.

    kind: "world" or "general".
    """

    kind: str  # "world" | "general"
    anchor: str
    positive: str
    negative: str


# ----------------------------------------------------------------------------------------------------------- scenes
def paraphrase_scene(scene: Scene, rng: Random) -> str:
    """Describe a scene in one of many ways; rows and columns give positions, scattered ones not."""
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
    """Describe a row from right to left, or a column from bottom to top."""
    start, end = ("right", "left") if scene.arrangement == "row" else ("bottom", "top")
    each = listing([with_article(thing.kind.phrase()) for thing in reversed(scene.things)])
    form = rng.choice(
        ("From {0} to {1}: {2}.", "From {0} to {1} there are {2}.", "I see, from {0} to {1}, {2}.")
    )
    return form.format(start, end, each)


def _cased(text: str, rng: Random) -> str:
    return text.lower().rstrip(".") if rng.random() < 0.3 else text


def alter_scene(scene: Scene, rng: Random) -> Scene:
    """Change one fact: a colour, a shape, a size, the number of things, or an order."""
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
    """Return a key that is equal for scenes of equal descriptions."""
    kinds = [str(thing.kind) for thing in scene.things]
    ordered = scene.arrangement != "scatter"
    return (scene.arrangement if ordered else "scatter", *(kinds if ordered else sorted(kinds)))


# ------------------------------------------------------------------------------------------------- general sentences
def paraphrase_sentence(text: str, rng: Random) -> str:
    """Rewrite a sentence with synonyms, contractions, digits, or another case or order."""
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


def replace_word(text: str, rng: Random) -> str | None:
    """Replace one word by another of its section; None if it has none to replace."""
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


# ---------------------------------------------------------------------------------------------------------- triplets
def _is_held_out(key: str) -> bool:
    return in_held_out_share(key, HELD_OUT_SHARE)


def world_triplet(rng: Random, *, held_out: bool) -> Triplet:
    """Make a triplet of scene descriptions."""
    while True:
        scene = sample_scene(rng, min_things=2)
        near = alter_scene(scene, rng)
        keys = ["/".join(map(str, _meaning(one))) for one in (scene, near)]
        if _is_held_out(keys[0]) == held_out and (held_out or not _is_held_out(keys[1])):
            break
    text = paraphrase_scene(scene, rng)
    return Triplet(
        "world",
        text,
        _reworded(text, lambda: paraphrase_scene(scene, rng)),
        paraphrase_scene(near, rng),
    )


def general_triplet(rng: Random, *, held_out: bool) -> Triplet:
    """Make a triplet of general sentences."""
    while True:
        text = general(rng)
        near = replace_word(text, rng)
        if near is not None and len(text.split()) > 2 and _is_held_out(text.lower()) == held_out:
            break
    return Triplet(
        "general",
        text,
        _reworded(text, lambda: paraphrase_sentence(text, rng)),
        paraphrase_sentence(near, rng),
    )


def _reworded(text: str, again: Callable[[], str]) -> str:
    """Return another wording, if one of a few attempts gives one."""
    for _ in range(8):
        if (other := again()) != text:
            break
    return other


def triplet(seed: int, index: int) -> Triplet:
    """Return a training triplet. Raises RecipeError for a held-out seed."""
    check_training_seed(seed)
    rng = Random(f"embed/{seed}/{index}")
    return (world_triplet if rng.random() < WORLD_SHARE else general_triplet)(rng, held_out=False)


def held_out(kind: str, count: int) -> Iterator[Triplet]:
    """Yield triplets whose scenes and sentences training excludes."""
    make = {"world": world_triplet, "general": general_triplet}[kind]
    for seed in HELD_OUT_SEEDS[:count]:
        yield make(Random(f"embed/{seed}"), held_out=True)


def vocabulary() -> list[str]:
    """Return texts that contain every word of the lexicon, for training a tokenizer."""
    return [
        *words(*_sections()),
        *(number(value) for value in range(100)),
        *COLOURS,
        *SHAPES,
        *SIZES,
    ]


def _sections() -> tuple[str, ...]:
    from recipes.speech.lexicon import sections

    return tuple(name for name in sections() if name != "irregular")
