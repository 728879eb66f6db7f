"""Write requests that tools other than `draw` answer: declarations, calls and results.

Most tools are composed of random words and asked for with random values, so that a call can only
be copied: its name and fields from the declaration, its values from the request. The tools and
their requests are for training; what they are scored with is made elsewhere.
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
    digest,
    user,
    weighted_choice,
)
from recipes.chat.mix import Mix
from recipes.chat.talk import abilities
from recipes.chat.tools import (
    draw_call,
    draw_result,
    draw_tool,
    drawing_prompt,
    drawing_request,
)
from recipes.chat.topics import NAMES, PLACES, THINGS
from recipes.speech.lexicon import article, plural, verbs, words

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
_FIELDS = (
    "id", "name", "value", "key", "title", "text", "item", "target", "subject", "kind", "label", "code", "input",
    "which", "what", "who", "where",
)  # fmt: skip
_NUMBER_FIELDS = ("number", "count", "amount", "size", "quantity", "minutes", "id", "limit", "n")
_ONSETS = tuple(
    "b c d f g h j k l m n p r s t v w z br ch cl dr fr gr pl pr sh sl sp st th tr".split()
)
_CODAS = ("", "", "", "", "n", "r", "s", "l", "t", "m", "ck", "nd", "st", "rk", "x")

# Forms of requests: {v} and {t} are a skill's verb and noun, {a} and {b} its values in the order of its fields.
_ABOUT = (
    "{v} {t} {a}.", "{v} the {t} {a}.", "{v} the {t} {a}, please.", "Can you {v} the {t} {a}?", "{v} a {t} to {a}.",
    "{v} a {t} for {a}.", "{v} the {t} to {a}.", "{v} the {t} of {a}.", "What is the {t} of {a}?",
    "What is the {t} for {a}?", "Tell me the {t} of {a}.", "I need the {t} of {a}.", "{t} {a}", "{t} for {a}, please",
    "{v} the {t} at {a}.",
)  # fmt: skip
_DOING = (
    "{v} {a}.", "{v} the {a}.", "Please {v} the {a}.", "Can you {v} {a}?", "{v} on the {a}.", "{v} the {a} now.",
    "I want to {v} {a}.",
)  # fmt: skip
_COUNTED = ("{v} {a} {b}.", "Please {v} {a} {b}.", "{v} {a} of the {b}.", "I want to {v} {a} {b}.")
_BETWEEN = (
    "{v} a {t} from {a} to {b}.", "{v} the {t} from {a} to {b}.", "From {a} to {b}, {v} a {t}.", "{t} from {a} to {b}",
    "I need a {t} from {a} to {b}.",
)  # fmt: skip


def made_up_word(rng: Random) -> str:
    """Return a word that exists in no language, for the skill of copying."""
    parts = (
        rng.choice(_ONSETS) + rng.choice("aeiou") + rng.choice(_CODAS)
        for _ in range(rng.choice((1, 2, 2, 3)))
    )
    return "".join(parts)


def value(kind: str, rng: Random) -> str | int:
    """Return a value of a kind of field."""
    match kind:
        case "numeral":
            return str(value("number", rng))
        case "number":
            return rng.randint(0, 99) if rng.random() < 0.65 else rng.randint(100, 9999)
        case "place":
            known = rng.choice((*PLACES, *words("city", "land")))
            return known if rng.random() < 0.55 else made_up_word(rng).capitalize()
        case "name":
            known = rng.choice((*NAMES, *words("name")))
            return known if rng.random() < 0.55 else made_up_word(rng).capitalize()
        case "words":
            return " ".join(sample_word(rng) for _ in range(rng.randint(1, 3)))
        case "thing":
            return sample_word(rng)
        case "things":
            return plural(sample_word(rng))
    fixed = {
        "unit": _UNITS,
        "language": _LANGUAGES,
        "room": _ROOMS,
        "device": _DEVICES,
        "colour": _COLOURS,
    }
    return rng.choice(fixed[kind])


def sample_word(rng: Random) -> str:
    """Return a word for a tool, a field or a value: in a third of cases it is made up."""
    draw = rng.random()
    if draw < 0.35:
        return made_up_word(rng)
    return rng.choice(THINGS if draw < 0.5 else words("thing", "food", "animal", "person", "place"))


def sample_skill(rng: Random) -> Skill:
    """Draw a skill: a known one, at times under other names, or one composed of random words."""
    if rng.random() < 0.7:
        return composed_skill(rng)
    skill = rng.choice(SKILLS)
    return skill if rng.random() < 0.5 else renamed(skill, rng)


def composed_skill(rng: Random) -> Skill:
    """Compose a skill of a verb and a noun, with one field, a counted one or two ends."""
    verb = rng.choice(verbs("transitive") + verbs("irregular")).base
    verb = made_up_word(rng) if rng.random() < 0.1 else verb
    noun, draw = sample_word(rng), rng.random()
    name = rng.choice((f"{verb}_{noun}", f"{verb}_{noun}", noun, verb))
    if draw < 0.4:
        kind = rng.choice(("name", "number", "number", "thing", "place"))
        forms = rng.sample(_ABOUT, 3)
        kinds: tuple[str, ...] = (kind,)
        description = rng.choice(
            (f"{verb} {article(noun)}.", f"{verb} the {noun}.", f"the {noun} of something.")
        )
    elif draw < 0.55:
        forms, kinds = rng.sample(_DOING, 3), (rng.choice(("thing", "thing", "device", "name")),)
        name = verb if rng.random() < 0.5 else name
        description = rng.choice(
            (f"{verb} something.", f"{verb} a thing.", f"{verb} {article(noun)}.")
        )
    elif draw < 0.8:
        forms, kinds = list(_COUNTED), ("number", "things")
        description = rng.choice(
            (f"{verb} some goods.", f"{verb} a number of things.", f"{verb} {plural(noun)}.")
        )
    else:
        kind = rng.choice(("place", "place", "name", "thing"))
        forms, kinds = list(_BETWEEN), (kind, kind)
        description = rng.choice(
            (f"{verb} {article(noun)}.", f"{verb} the {noun} between two ends.")
        )
    fields = [sample_field(kind, rng) for kind in kinds]
    while len(set(fields)) < len(fields):
        fields[1] = sample_word(rng)
    slots = dict(zip("ab", (f"{{{field}}}" for field in fields), strict=False))
    requests = tuple(first_up(form.format(v=verb, t=noun, **slots)) for form in forms)
    ordered = list(zip(fields, kinds, strict=True))
    if "number" in kinds and rng.random() < 0.5:  # their types tell them apart
        ordered.reverse()
    return Skill(name, first_up(description), dict(ordered), requests)


def sample_field(kind: str, rng: Random) -> str:
    """Return the name of a field for values of `kind`; half of them tell nothing about it."""
    if rng.random() < 0.5:
        return sample_word(rng)
    return rng.choice(_NUMBER_FIELDS if kind == "number" else _FIELDS)


def first_up(text: str) -> str:
    """Return the text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def renamed(skill: Skill, rng: Random) -> Skill:
    """Return a skill whose name and fields are other words, which a call has to copy."""
    names = {field: sample_word(rng) if rng.random() < 0.5 else field for field in skill.fields}
    if len(set(names.values())) < len(names):
        names = {field: field for field in skill.fields}
    requests = tuple(
        text.format(**{field: f"{{{other}}}" for field, other in names.items()})
        for text in skill.requests
    )
    fields = {names[field]: kind for field, kind in skill.fields.items()}
    other = rng.choice((f"{sample_word(rng)}_{sample_word(rng)}", sample_word(rng), skill.name))
    return Skill(other, skill.description, fields, requests)


def declaration(skill: Skill, rng: Random, *, alone: bool) -> dict[str, Any]:
    """Declare a skill as a function with a JSON schema.

    alone: no other one is declared, so that its description may be left out.
    """
    properties: dict[str, Any] = {}
    for field, kind in skill.fields.items():
        properties[field] = {"type": "integer" if kind == "number" else "string"}
        if rng.random() < 0.2:
            properties[field]["description"] = rng.choice(
                (f"The {field}.", field, f"The {field} to use")
            )
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.85:
        parameters["required"] = list(properties)
    if rng.random() < 0.2:
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": skill.name}
    if not alone or rng.random() < 0.85:
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
    many = rng.choice((1, 1, 2, 2, 3))
    while len(skills) < many:
        skill = sample_skill(rng)
        if skill.name not in [one.name for one in skills]:
            skills.append(skill)
    can_draw = rng.random() < 0.3
    declared = [declaration(skill, rng, alone=many == 1 and not can_draw) for skill in skills]
    if can_draw:
        declared.insert(rng.randint(0, len(declared)), draw_tool(rng))
    writer.system(share=0.25)
    for _ in range(rng.choice((1, 2, 3, 4, 5))):
        if rng.random() < 0.12:
            add_talk(writer)
        elif can_draw and rng.random() < 0.4:
            add_drawing(writer)
        else:
            add_call(writer, rng.choice(skills))
    if rng.random() < 0.5 and writer.messages[-2]["role"] == "tool":
        del writer.messages[-2:]  # the call is the last turn
    return writer.finish(declared=tuple(declared))


def abilities_conversation(rng: Random, mix: Mix) -> Conversation:
    """Write a question about what the model can do, before or after other talk at times."""
    writer = ConversationWriter(rng, mix)
    writer.system(share=0.25)
    for _ in range(rng.choice((0, 0, 1))):
        writer.talk(weighted_choice(rng, mix.talk))
    question = abilities(rng)
    writer.exchange(question.text, question.answer)
    for _ in range(rng.choice((0, 0, 1, 2))):
        writer.talk(weighted_choice(rng, mix.talk))
    return writer.finish()


def add_talk(writer: ConversationWriter) -> None:
    """Add one exchange that calls no tool."""
    if writer.rng.random() < 0.25:
        question = abilities(writer.rng)
        writer.exchange(question.text, question.answer)
    else:
        writer.talk(weighted_choice(writer.rng, writer.mix.talk))


def add_drawing(writer: ConversationWriter) -> None:
    """Add a request for a picture, its call, the result and the sentence after it."""
    rng = writer.rng
    what = drawing_prompt(rng)
    writer.keys.add(digest(f"draw {what}"))
    asked = drawing_request(what, rng)
    said = casual(asked, rng)
    result, sentence = draw_result(rng, what)
    writer.messages += [user(said if what in said else asked), draw_call(what)]
    writer.messages += [result, assistant(sentence)]


def add_call(writer: ConversationWriter, skill: Skill) -> None:
    """Add a request for a skill, its call, the result and the sentence after it."""
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
