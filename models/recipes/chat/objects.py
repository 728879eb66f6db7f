"""Write replies in JSON, so that strings, numbers and lists end under any schema.

A schema reaches the model as a grammar, not as text: what it should learn is the shortest sensible
value after any key. The first token of a reply is no target, since nothing asks for it.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from recipes.chat.calls import made_up_word
from recipes.chat.data import Conversation, ConversationWriter, assistant, user, weighted_choice
from recipes.chat.mix import Mix
from recipes.chat.topics import NAMES, PLACES, THINGS
from recipes.world.scenes import COLOURS, SHAPES, SIZES, describe, sample_scene

_STRINGS: dict[str, tuple[str, ...]] = {
    "name": NAMES, "city": PLACES, "country": PLACES, "title": THINGS, "colour": COLOURS, "color": COLOURS,
    "shape": SHAPES, "size": SIZES, "answer": ("yes", "no", *COLOURS), "status": ("ok", "done", "open"),
    "type": SHAPES, "author": NAMES, "product": THINGS, "topic": THINGS, "language": ("English",),
    "summary": THINGS, "description": THINGS, "text": THINGS, "label": SHAPES, "category": THINGS,
    "email": ("anna@example.com", "ben@example.com"), "date": ("2024-01-05", "2023-11-20"),
}  # fmt: skip
_NUMBERS = ("age", "count", "number", "total", "price", "score", "year", "quantity", "id", "amount")
_FLAGS = ("ok", "valid", "found", "active", "is_red", "done", "available", "visible")
_LISTS = ("items", "tags", "colours", "shapes", "names", "values", "things", "words")
_REQUESTS = (
    "Answer in JSON.", "Give me JSON.", "Return a JSON object.", "Reply as JSON with {0}.",
    "Extract {0} as JSON.", "Make an example with {0}.", "Invent a record with {0}.", "Describe it as JSON.",
)  # fmt: skip


def _string(key: str, rng: Random) -> str:
    draw = rng.random()
    if key in _STRINGS and draw < 0.8:
        found = rng.choice(_STRINGS[key])
        return f"a {found}" if key in ("summary", "description", "text") else found
    return rng.choice(THINGS) if draw < 0.9 else made_up_word(rng)


def _value(rng: Random, depth: int) -> tuple[str, Any]:
    """Return a key and its value."""
    draw = rng.random()
    key = made_up_word(rng) if rng.random() < 0.2 else ""
    if draw < 0.45:
        key = key or rng.choice(list(_STRINGS))
        return key, _string(key, rng)
    if draw < 0.7:
        number: float = rng.randint(0, 20) if rng.random() < 0.8 else rng.randint(0, 400) / 4
        return key or rng.choice(_NUMBERS), -number if rng.random() < 0.05 else number
    if draw < 0.8:
        return key or rng.choice(_FLAGS), rng.random() < 0.5
    if draw < 0.92 or depth > 1:
        if rng.random() < 0.7:
            return key or rng.choice(_LISTS), [_string("", rng) for _ in range(rng.randint(0, 3))]
        return key or rng.choice(_LISTS), [rng.randint(0, 20) for _ in range(rng.randint(0, 3))]
    if draw < 0.95:
        return key or rng.choice(_LISTS), [
            _object(rng, depth + 1) for _ in range(rng.randint(0, 2))
        ]
    return key or rng.choice(("person", "address", "data", "result")), _object(rng, depth + 1)


def _object(rng: Random, depth: int = 0) -> dict[str, Any]:
    return dict(_value(rng, depth) for _ in range(rng.randint(1, 4 if depth == 0 else 2)))


def object_conversation(rng: Random, mix: Mix) -> Conversation:
    """Write a question and a reply in JSON; a list, a text or a number alone at times."""
    writer = ConversationWriter(rng, mix)
    writer.system()
    draw = rng.random()
    found: Any = _object(rng)
    if draw > 0.85:
        found = _value(rng, 1)[1]
    if rng.random() < 0.35:  # a question that alone would be answered in words
        scene = sample_scene(rng)
        text = describe(scene, rng)
        writer.set_scene(scene)
        if rng.random() < 0.7:
            text = f"{text} {rng.choice(('How many are there?', 'What do you see?', 'Which colours?'))}"
    elif rng.random() < 0.3:
        writer.talk(weighted_choice(rng, mix.talk))
        text = writer.messages[-2]["content"]
        del writer.messages[-2:]
    else:
        keys = list(found) if isinstance(found, dict) else ["a value"]
        text = rng.choice(_REQUESTS).format(
            " and ".join(keys) if len(keys) < 3 else ", ".join(keys)
        )
    separators = (", ", ": ") if rng.random() < 0.85 else (",", ":")
    writer.messages += [user(text), assistant(json.dumps(found, separators=separators))]
    return writer.finish("json")
