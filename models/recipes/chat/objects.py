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
from recipes.speech.lexicon import words
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
_RECORDS = ("person", "address", "data", "result")
_REQUESTS = (
    "Answer in JSON.", "Give me JSON.", "Return a JSON object.", "Reply as JSON with {0}.",
    "Extract {0} as JSON.", "Make an example with {0}.", "Invent a record with {0}.", "Describe it as JSON.",
    "Describe a {1}.", "Make up a {1}.", "Tell me about a {1}.", "Write a {1}.", "Give me a {1}.",
)  # fmt: skip
_FACTS = ("{0}", "Extract: {0}", "Read this: {0}", "{0} Answer in JSON.", "As JSON: {0}")
_LINKS = ("{0} {1}", "{0}: {1}", "{0} is {1}", "the {0} is {1}", "{0} = {1}")


def _string(key: str, rng: Random, *, made_up: float = 0.0) -> str:
    """Return a value; `made_up` of them are no words, which only a request that tells them ends."""
    if rng.random() < made_up:
        return made_up_word(rng)
    draw = rng.random()
    if key in _STRINGS and draw < 0.6:
        found = rng.choice(_STRINGS[key])
        return f"a {found}" if key in ("summary", "description", "text") else found
    return rng.choice(THINGS if draw < 0.75 else words("thing", "food", "person", "name"))


def _key(known: tuple[str, ...], rng: Random) -> str:
    """Return a key: a known one for its kind of value, or one that tells nothing about it."""
    draw = rng.random()
    if draw < 0.5:
        return rng.choice(known)
    if draw < 0.7:
        return rng.choice((*_STRINGS, *_NUMBERS, *_FLAGS, *_LISTS, *_RECORDS))
    word = made_up_word(rng) if draw < 0.8 else rng.choice(words("thing", "abstract", "person"))
    return word if draw < 0.93 else f"{word}_{made_up_word(rng)}"


def _number(rng: Random) -> float:
    draw = rng.random()
    if draw < 0.75:
        number: float = rng.randint(0, 20)
    elif draw < 0.85:
        number = rng.randint(21, 2100)
    else:
        number = rng.randint(0, 400) / rng.choice((4, 10))
    return -number if rng.random() < 0.04 else number


def _value(rng: Random, depth: int) -> tuple[str, Any]:
    """Return a key and its value."""
    draw = rng.random()
    if draw < 0.42:
        key = _key(tuple(_STRINGS), rng)
        return key, _string(key, rng)
    if draw < 0.67:
        return _key(_NUMBERS, rng), _number(rng)
    if draw < 0.75:
        return _key(_FLAGS, rng), rng.choice((True, False, True, False, None))
    if draw < 0.89 or depth > 1:
        count = rng.choice((0, 1, 1, 2, 2, 3))
        if rng.random() < 0.6:
            return _key(_LISTS, rng), [_string("", rng) for _ in range(count)]
        return _key(_LISTS, rng), [_number(rng) for _ in range(count)]
    if draw < 0.95:
        return _key(_LISTS, rng), [_object(rng, depth + 1) for _ in range(_few(rng))]
    return _key(_RECORDS, rng), _object(rng, depth + 1)


def _object(rng: Random, depth: int = 0) -> dict[str, Any]:
    return dict(_value(rng, depth) for _ in range(_few(rng)))


def _few(rng: Random) -> int:
    """Return 1 or more: after each, the end is likelier than another one.

    So a greedy reply ends as soon as its schema lets it: it would not if every length were as likely.
    """
    count = 1
    while rng.random() < 0.4:
        count += 1
    return count


def _facts(rng: Random) -> tuple[str, dict[str, Any]]:
    """Return facts in words, and the record that they make: its values are copied."""
    found: dict[str, Any] = {}
    for _ in range(rng.choice((1, 2, 2, 3))):
        is_number = rng.random() < 0.35
        key = _key(_NUMBERS if is_number else tuple(_STRINGS), rng)
        found[key] = rng.randint(0, 2100) if is_number else _string(key, rng, made_up=0.3)
    link, joint = rng.choice(_LINKS), rng.choice((", ", ", ", "; ", "\n"))
    told = joint.join(link.format(key, value) for key, value in found.items())
    return rng.choice(_FACTS).format(f"{told}."), found


def object_conversation(rng: Random, mix: Mix) -> Conversation:
    """Write a question and a reply in JSON; a list, a text or a number alone at times."""
    writer = ConversationWriter(rng, mix)
    writer.system(share=0.2)
    draw = rng.random()
    found: Any = _object(rng)
    if draw > 0.9:
        found = _value(rng, 1)[1]
    draw = rng.random()
    if draw < 0.35:
        text, found = _facts(rng)
    elif draw < 0.55:  # a question that alone would be answered in words
        scene = sample_scene(rng)
        text = describe(scene, rng)
        writer.set_scene(scene)
        if rng.random() < 0.7:
            text = f"{text} {rng.choice(('How many are there?', 'What do you see?', 'Which colours?'))}"
    elif draw < 0.75:
        writer.talk(weighted_choice(rng, mix.talk))
        text = writer.messages[-2]["content"]
        del writer.messages[-2:]
    else:
        keys = list(found) if isinstance(found, dict) else ["a value"]
        told = " and ".join(keys) if len(keys) < 3 else ", ".join(keys)
        text = rng.choice(_REQUESTS).format(told, rng.choice(words("thing", "person", "place")))
    writer.messages += [user(text), assistant(json.dumps(found))]
    return writer.finish("json")


def repeating_conversation(rng: Random, mix: Mix) -> tuple[Conversation, int]:
    """Write a reply that repeated a field, an item or a piece of a word, and then ends.

    Returns the conversation, and how many characters of its last message are no target: all up to the
    end of the repetition. So only ending is taught, which is what a greedy reply in a loop fails at.
    """
    writer = ConversationWriter(rng, mix)
    writer.system(share=0.1)
    told = rng.choice(_REQUESTS).format("a value", rng.choice(words("thing", "person", "place")))
    before, loop, closing = "", "", ""
    for depth in range(rng.choice((1, 1, 2, 2, 3))):  # what the repetition stands in
        is_list = depth > 0 and rng.random() < 0.5
        known = dict(_value(rng, 1) for _ in range(rng.choice((0, 1, 1, 2, 3))))
        key = _key(_LISTS if is_list else _RECORDS, rng)
        opened = "".join(f"{json.dumps(one)}: {json.dumps(each)}, " for one, each in known.items())
        if depth == 0:
            before, closing = "{" + opened, "}"
        elif is_list:
            before, closing = f'{before}"{key}": [{{{opened}', "}]" + closing
        else:
            before, closing = f'{before}"{key}": {{{opened}', "}" + closing
    times = rng.choice((2, 2, 3, 4, 5))
    kind = rng.choice(("field", "field", "fields", "records", "texts", "numbers", "piece"))
    match kind:
        case "field" | "fields":
            some = [_pair(rng) for _ in range(1 if kind == "field" else 2)]
            loop = ", ".join(some * times)
        case "records":
            record = json.dumps(_object(rng, 2))
            loop = f'"{_key(_LISTS, rng)}": [{", ".join([record] * times)}]'
        case "texts":
            loop = f'"{_key(_LISTS, rng)}": [{", ".join([json.dumps(_string("", rng, made_up=0.2))] * times)}]'
        case "numbers":
            loop = f'"{_key(_LISTS, rng)}": [{", ".join([json.dumps(_number(rng))] * times)}]'
        case "piece":
            word = _string("", rng, made_up=0.5)
            piece = word[rng.randint(0, len(word) // 2) :] * (times + 1)
            loop = f'"{_key(tuple(_STRINGS), rng)}": "{word}{piece}"'
    ending = len(loop) - len(loop.rstrip('"]'))
    reply = before + loop + closing
    writer.messages += [user(told), assistant(reply)]
    return writer.finish("json"), len(before) + len(loop) - ending


def _pair(rng: Random) -> str:
    key, found = _value(rng, 2)
    return f"{json.dumps(key)}: {json.dumps(found)}"
