"""Write requests that tools other than `draw` answer: declarations, calls and results.

The tools and their requests are for training; what they are scored with is made elsewhere.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any, NamedTuple

from recipes.chat.data import (
    Conversation,
    ConversationWriter,
    assistant,
    casual,
    user,
    weighted_choice,
)
from recipes.chat.mix import Mix
from recipes.chat.tools import draw_tool
from recipes.chat.topics import NAMES, PLACES, THINGS

RESULT_FAILED = "Sorry, that failed."


class Skill(NamedTuple):
    """Describe a tool: its name, description, the kinds of its fields, and requests for it."""

    name: str
    description: str
    fields: dict[str, str]  # name: kind of value
    requests: tuple[str, ...]


def _skills(*rows: tuple[str, str, str, tuple[str, ...]]) -> tuple[Skill, ...]:
    return tuple(
        Skill(name, description, dict(field.split(":") for field in fields.split()), requests)
        for name, description, fields, requests in rows
    )


SKILLS = _skills(
    ("get_weather", "Get the weather of a city.", "city:place",
     ("What is the weather in {city}?", "How is the weather in {city}?", "Weather in {city}",
      "Will it rain in {city}?")),
    ("search", "Search the web.", "query:thing",
     ("Search for {query}.", "Look up {query}.", "Search the web for {query}.", "Find {query} online.")),
    ("speak", "Say a text aloud.", "text:words",
     ("Say {text}.", "Say {text} aloud.", "Please speak {text}.")),
    ("get_time", "Current time of a place.", "place:place",
     ("What time is it in {place}?", "Tell me the time in {place}.", "Time in {place}")),
    ("send_email", "Send an email.", "to:name",
     ("Send an email to {to}.", "Email {to}.", "Write an email to {to}, please.")),
    ("set_timer", "Set a timer.", "minutes:number",
     ("Set a timer for {minutes} minutes.", "Timer for {minutes} minutes", "Start a timer of {minutes} minutes.")),
    ("play_song", "Play a song.", "title:words",
     ("Play the song {title}.", "Play {title}.", "I want to hear {title}.")),
    ("call_person", "Call a person on the phone.", "name:name",
     ("Call {name}.", "Phone {name}, please.", "Can you call {name}?")),
    ("add_item", "Add an item to the shopping list.", "item:thing",
     ("Add {item} to my shopping list.", "Put {item} on the list.", "I need {item}, add it to the list.")),
    ("book_table", "Book a table at a restaurant.", "name:name people:number",
     ("Book a table for {people} people for {name}.", "A table for {people}, the name is {name}.")),
    ("convert", "Convert an amount.", "amount:number unit:unit",
     ("Convert {amount} to {unit}.", "How much is {amount} in {unit}?")),
    ("translate", "Translate a word.", "word:thing language:language",
     ("Translate {word} into {language}.", "What is {word} in {language}?", "How do you say {word} in {language}?")),
    ("open_door", "Open a door.", "door:number",
     ("Open door {door}.", "Please open door number {door}.")),
    ("set_light", "Set a lamp's colour.", "room:room colour:colour",
     ("Make the light in the {room} {colour}.", "Set the {room} light to {colour}.")),
    ("find_route", "Find a route between two places.", "start:place end:place",
     ("How do I get from {start} to {end}?", "Find a route from {start} to {end}.", "From {start} to {end}, please.")),
    ("remind", "Remind the user of something.", "what:thing hours:number",
     ("Remind me of the {what} in {hours} hours.", "In {hours} hours remind me of the {what}.")),
    ("get_user", "Read a user's record.", "id:number",
     ("Get user {id}.", "Show user number {id}.", "Who is user {id}?")),
    ("order", "Order goods.", "product:thing count:number",
     ("Order {count} of {product}.", "Buy {count} {product}.", "I would like {count} {product}.")),
    ("lookup_word", "Look a word up in the dictionary.", "word:thing",
     ("What does {word} mean?", "Define {word}.", "Look up the word {word}.")),
    ("turn_on", "Turn a device on.", "device:device",
     ("Turn on the {device}.", "Switch the {device} on.", "{device} on, please")),
    ("turn_off", "Turn a device off.", "device:device",
     ("Turn off the {device}.", "Switch the {device} off.", "{device} off, please")),
    ("get_price", "Get the price of a product.", "product:thing",
     ("How much is the {product}?", "What does {product} cost?", "Price of {product}")),
    ("take_note", "Save a note.", "text:words",
     ("Note: {text}.", "Take a note: {text}.", "Write down {text}.")),
    ("roll_dice", "Roll dice.", "count:number",
     ("Roll {count} dice.", "Throw {count} dice, please.")),
    ("count_letters", "Count the letters of a word.", "word:thing",
     ("How many letters has {word}?", "Count the letters in {word}.")),
)  # fmt: skip
_UNITS = ("meters", "miles", "euros", "dollars", "pounds", "grams", "liters", "feet", "kilometers")
_LANGUAGES = ("French", "Spanish", "German", "Italian", "Latin", "Greek", "Polish", "Dutch")
_ROOMS = ("kitchen", "bathroom", "bedroom", "hall", "office", "garage", "living room")
_DEVICES = (
    "radio",
    "lamp",
    "television",
    "heating",
    "fan",
    "oven",
    "washing machine",
    "coffee machine",
)
_COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "white")
_VERBS = (
    "get",
    "find",
    "open",
    "close",
    "start",
    "stop",
    "show",
    "read",
    "delete",
    "check",
    "update",
    "list",
)
_LETTERS = ("bcdfghjklmnprstvwz", "aeiou")


def made_up_word(rng: Random) -> str:
    """Return a word that exists in no language, for the skill of copying."""
    return "".join(rng.choice(_LETTERS[i % 2]) for i in range(rng.randint(3, 8)))


def value(kind: str, rng: Random) -> str | int:
    """Return a value of a kind of field."""
    match kind:
        case "number":
            return rng.randint(0, 99) if rng.random() < 0.8 else rng.randint(100, 9999)
        case "place":
            return rng.choice(PLACES) if rng.random() < 0.7 else made_up_word(rng).capitalize()
        case "name":
            return rng.choice(NAMES) if rng.random() < 0.7 else made_up_word(rng).capitalize()
        case "words":
            return " ".join(_word(rng) for _ in range(rng.randint(1, 4)))
        case "thing":
            return _word(rng)
    fixed = {
        "unit": _UNITS,
        "language": _LANGUAGES,
        "room": _ROOMS,
        "device": _DEVICES,
        "colour": _COLOURS,
    }
    return rng.choice(fixed[kind])


def _word(rng: Random) -> str:
    return rng.choice(THINGS) if rng.random() < 0.7 else made_up_word(rng)


def sample_skill(rng: Random) -> Skill:
    """Draw a skill: a known one, at times under other names, or one of a verb and a thing."""
    if rng.random() < 0.5:
        skill = rng.choice(SKILLS)
        return skill if rng.random() < 0.4 else renamed(skill, rng)
    verb, thing = rng.choice(_VERBS), _word(rng)
    kind = rng.choice(("name", "number", "thing", "place"))
    field = rng.choice(("id", "name", "value", "key", "title", thing))
    requests = (
        f"{verb.capitalize()} {thing} {{{field}}}.",
        f"{verb.capitalize()} the {thing} {{{field}}}, please.",
        f"Can you {verb} the {thing} {{{field}}}?",
    )
    name = f"{verb}_{thing}" if rng.random() < 0.6 else rng.choice((verb, thing))
    return Skill(name, f"{verb.capitalize()} a {thing}.", {field: kind}, requests)


def renamed(skill: Skill, rng: Random) -> Skill:
    """Return a skill whose name and fields are other words, which a call has to copy."""
    names = {field: _word(rng) if rng.random() < 0.5 else field for field in skill.fields}
    if len(set(names.values())) < len(names):
        names = {field: field for field in skill.fields}
    requests = skill.requests
    for field, other in names.items():
        requests = tuple(text.replace(f"{{{field}}}", f"{{{other}}}") for text in requests)
    fields = {names[field]: kind for field, kind in skill.fields.items()}
    other = (
        f"{rng.choice(_VERBS)}_{_word(rng)}"
        if rng.random() < 0.4
        else rng.choice((_word(rng), skill.name))
    )
    return Skill(other, skill.description, fields, requests)


def declaration(skill: Skill, rng: Random) -> dict[str, Any]:
    """Declare a skill as a function with a JSON schema."""
    properties: dict[str, Any] = {}
    for field, kind in skill.fields.items():
        properties[field] = {"type": "integer" if kind == "number" else "string"}
        if rng.random() < 0.3:
            properties[field]["description"] = rng.choice(
                (f"The {field}.", field, f"The {field} to use")
            )
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.85:
        parameters["required"] = list(properties)
    if rng.random() < 0.2:
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": skill.name}
    if rng.random() < 0.85:
        function["description"] = skill.description
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _result(rng: Random) -> tuple[str, str]:
    """Return the content of a tool's message and the sentence after it."""
    draw = rng.random()
    if draw < 0.12:
        reason = rng.choice(("timeout", "failed", "not found"))
        return rng.choice((f"error: {reason}", json.dumps({"error": reason}))), RESULT_FAILED
    if draw < 0.5:
        return rng.choice(("ok", "done", "success", "", json.dumps({"status": "ok"}))), "Done."
    found = str(value(rng.choice(("number", "thing", "name", "words")), rng))
    content = (
        found
        if rng.random() < 0.6
        else json.dumps({rng.choice(("result", "value", "answer")): found})
    )
    return content, f"The result is {found}."


def calling_conversation(rng: Random, mix: Mix) -> Conversation:
    """Write requests for declared tools among other turns."""
    writer = ConversationWriter(rng, mix)
    skills: list[Skill] = []
    while len(skills) < rng.choice((1, 1, 2, 2, 3)):
        skill = sample_skill(rng)
        if skill.name not in [one.name for one in skills]:
            skills.append(skill)
    declared = [declaration(skill, rng) for skill in skills]
    if rng.random() < 0.2:
        declared.insert(rng.randint(0, len(declared)), draw_tool(rng))
    writer.system()
    for _ in range(rng.choice((1, 2, 2, 3))):
        if rng.random() < 0.15:
            writer.talk(weighted_choice(rng, mix.talk))
            continue
        _add_call(writer, rng.choice(skills))
    return writer.finish(declared=tuple(declared))


def _add_call(writer: ConversationWriter, skill: Skill) -> None:
    rng = writer.rng
    values = {field: value(kind, rng) for field, kind in skill.fields.items()}
    text = rng.choice(skill.requests).format(**values)
    said = casual(text, rng)
    if any(str(each) not in said for each in values.values()):
        said = text
    writer.messages += [
        user(said),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": skill.name, "arguments": values}}
            ],
        },
    ]
    content, sentence = _result(rng)
    writer.messages += [
        {"role": "tool", "name": skill.name, "content": content},
        assistant(sentence),
    ]
