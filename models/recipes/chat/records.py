"""Write records as a JSON schema forces them, and weigh their tokens by what a schema leaves open.

Under a schema the keys are given, and so is each comma before a field that is required. What is left
to the model are the values, and the end of a string, a list or an object where it may end: so keys
are no targets, and commas are light ones. A greedy reply then ends wherever its schema lets it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from recipes.chat.calls import made_up_word
from recipes.chat.data import Conversation, ConversationWriter, assistant, user, weighted_choice
from recipes.chat.mix import Mix
from recipes.chat.topics import NAMES, PLACES, THINGS
from recipes.speech.lexicon import plural, words
from recipes.world.scenes import COLOURS, SHAPES, describe, sample_scene

COMMA_WEIGHT = 0.2
_ASKED = (
    "Give me a {0}.", "Make up a {0}.", "Describe the {0}.", "A {0}, please.", "Tell me of a {0}.",
    "Fill in the form.", "Return the record.", "Extract the fields.", "What are the facts?", "An example of a {0}.",
)  # fmt: skip
_CODES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def record_conversation(rng: Random, mix: Mix) -> Conversation:
    """Write any request and a record in reply, whose fields do not depend on it."""
    writer = ConversationWriter(rng, mix)
    writer.system(share=0.15)
    draw = rng.random()
    if draw < 0.4:
        kind = rng.choice(words("thing", "person", "place", "animal"))
        text = rng.choice(_ASKED).format(kind)
    elif draw < 0.6:
        scene = sample_scene(rng)
        writer.set_scene(scene)
        text = f"{describe(scene, rng)} {rng.choice(('What is there?', 'How many are there?', ''))}"
    else:
        writer.talk(weighted_choice(rng, mix.talk))
        text = writer.messages[-2]["content"]
        del writer.messages[-2:]
    found = _record(rng)
    writer.messages += [user(text.strip()), assistant(json.dumps(found))]
    return writer.finish("record")


def _record(rng: Random, depth: int = 0) -> dict[str, Any]:
    count = rng.choice((1, 1, 2, 2, 3, 4, 5)) if depth == 0 else rng.choice((1, 1, 2, 2, 3))
    return {_key(rng): _value(rng, depth) for _ in range(count)}


def _key(rng: Random) -> str:
    first = rng.choice(words("thing", "abstract", "person", "place"))
    draw = rng.random()
    if draw < 0.6:
        return first
    if draw < 0.68:
        return plural(first)
    if draw < 0.76:
        return made_up_word(rng)
    second = rng.choice(words("thing", "abstract"))
    if draw < 0.84:
        return f"{first}{second.capitalize()}"
    return f"{rng.choice((first, 'has', 'can', 'no', 'max'))}_{second}"


def _value(rng: Random, depth: int) -> Any:
    """Return a value of any kind; of lists most have one item, none or two."""
    kinds: dict[str, float] = {
        "text": 8.0, "choice": 1.5, "integer": 4.0, "fraction": 1.5, "flag": 1.5, "null": 1.0, "date": 1.0,
        "code": 1.0, "texts": 1.5, "numbers": 1.5, "record": 1.5, "records": 1.5,
    }  # fmt: skip
    if depth > 2:
        del kinds["record"], kinds["records"]
    kind = weighted_choice(rng, kinds)
    plain: dict[str, Callable[[], Any]] = {
        "text": lambda: _text(rng),
        "choice": lambda: rng.choice((*COLOURS, *SHAPES, rng.randint(0, 9), None)),
        "integer": lambda: rng.randint(0, rng.choice((5, 20, 20, 100, 2030))),
        "fraction": lambda: rng.choice((0.5, 1.5, 2.5, 0.25, 3.5, 9.99, 1.0)),
        "flag": lambda: rng.random() < 0.5,
        "null": lambda: None,
        "date": lambda: f"20{rng.randint(10, 29)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
        "code": lambda: "".join(rng.choices(_CODES, k=2)) + str(rng.randint(100, 999)),
        "record": lambda: _record(rng, depth + 1),
    }
    if kind in plain:
        return plain[kind]()
    item = {"texts": "text", "numbers": "integer", "records": "record"}[kind]
    return [plain[item]() for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3)))]


def _text(rng: Random) -> str:
    draw = rng.random()
    if draw < 0.2:
        return rng.choice(COLOURS)
    if draw < 0.4:
        return rng.choice(SHAPES)
    if draw < 0.7:
        return rng.choice((*NAMES, *PLACES))
    return rng.choice(THINGS)


def shares(reply: str) -> list[float]:
    """Return the weight of each character of a reply in JSON: keys 0, commas light, all else 1."""
    found = [1.0] * len(reply)
    place = 0
    while place < len(reply):
        if reply[place] == ",":
            found[place] = COMMA_WEIGHT
        elif reply[place] == '"':
            end = place + 1
            while reply[end] != '"':
                end += 2 if reply[end] == "\\" else 1
            if reply[end + 1 : end + 2] == ":":
                found[place + 1 : end] = [0.0] * (end - place - 1)
            place = end
        place += 1
    return found
