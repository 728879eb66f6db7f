"""Write requests among tools that are alike, so that one word of the request decides.

Tools of one conversation share their verb, their noun or the kinds of their values, and each is
called, in any order. A value goes to the field of its type: numbers and texts come in either order,
in the request and in the declaration, and numbers may be declared as texts.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from recipes.chat.calls import (
    SKILLS,
    Skill,
    add_call,
    add_drawing,
    add_talk,
    declaration,
    first_up,
    made_up_word,
    renamed,
    sample_field,
    sample_word,
)
from recipes.chat.data import Conversation, ConversationWriter
from recipes.chat.mix import Mix
from recipes.chat.tools import draw_tool
from recipes.speech.lexicon import article, plural, verbs

NUMERAL = "numeral"  # a number that is declared as a text
KINDS_ALIKE = ("verb", "noun", "nothing")


class Form(NamedTuple):
    """Hold the kinds of a skill's values, and requests: {v} verb, {t} noun, {a}, {b} values."""

    kinds: tuple[str, ...]
    requests: tuple[str, ...]


_TEXTS = ("name", "thing", "place", "thing", "words")
_OF_ONE = (
    "{v} the {t} {a}.", "{v} {t} {a}.", "{v} the {t} to {a}.", "{v} the {t} of {a}.", "{v} a {t} for {a}.",
    "{v} {t} {a}", "Please {v} the {t} {a}.", "Can you {v} the {t} at {a}?", "I want to {v} the {t} {a}.",
    "{v} a {t} to {a}.", "{v} the {t} on {a}.", "{v} the {t} with {a}, please.", "{v} the {t} named {a}.",
)  # fmt: skip
_OF_ONE_NUMBER = (
    "{v} {t} number {a}.",
    "{v} {a} {ts}.",
    "{v} {a} {ts}, please.",
    "Can you {v} {a} {ts}?",
)
_NOUN_ONLY = (
    "What is the {t} of {a}?", "What is the {t} for {a}?", "I need the {t} of {a}.", "{t} {a}", "{t} of {a}",
    "Tell me the {t} for {a}.", "Is there a {t} at {a}?", "The {t} of {a}, please.", "How is the {t} in {a}?",
)  # fmt: skip
_VERB_ONLY = (
    "{v} {a}.",
    "{v} the {a}.",
    "Please {v} {a}.",
    "Can you {v} the {a}?",
    "{v} on the {a}.",
    "{v} {a} now.",
)
_COUNTED = (
    "{v} {a} {b}.",
    "{v} {a} {b}",
    "Please {v} {a} {b}.",
    "Can you {v} {a} {b}?",
    "{v} {a} of the {b}.",
)
_WITH_NUMBER = (
    "{v} the {t} of {b} to {a}.", "{v} the {t} {b} at {a}.", "{v} {a} {ts} for {b}.", "{v} a {t} for {b} with {a}.",
    "{v} {b} {a} times.", "{v} {a} {ts} to {b}.", "At {a}, {v} the {t} {b}.", "For {b}, {v} {a} {ts}.",
    "{v} the {t} {b}, {a}.", "{v} the {t} {a} of {b}.",
)  # fmt: skip
_ENDS = (
    "{v} a {t} from {a} to {b}.", "{v} the {t} from {a} to {b}.", "From {a} to {b}, {v} a {t}.", "{t} from {a} to {b}",
    "{v} the {t} {a} for {b}.", "{v} {a} to {b}.", "{v} {a} with {b}.", "I need a {t} from {a} to {b}.",
)  # fmt: skip


def sample_form(rng: Random, alike: str) -> Form:
    """Draw the kinds of a skill's values and requests that name what tells it from the others.

    Of skills that share the verb a request names the noun, and the other way round.
    """
    draw = rng.random()
    only: tuple[str, ...] = ()
    if draw < 0.45:
        kind = rng.choice((*_TEXTS, "number", "number", "number", NUMERAL))
        only = {"verb": _NOUN_ONLY, "noun": _VERB_ONLY, "nothing": (*_NOUN_ONLY, *_VERB_ONLY)}[
            alike
        ]
        numbers = _OF_ONE_NUMBER if kind in ("number", NUMERAL) else ()
        return Form((kind,), (*_OF_ONE, *numbers, *only))
    if draw < 0.6 and alike != "verb":
        return Form(("number", "things"), _COUNTED)
    if draw < 0.82:
        return Form(("number", rng.choice(_TEXTS[:-1])), _WITH_NUMBER)
    kind = rng.choice(_TEXTS[:-1])
    return Form((kind, kind), _ENDS)


def _usable(requests: tuple[str, ...], alike: str) -> list[str]:
    """Return the requests that tell the skill from those that share `alike`."""
    wanted = {"verb": ("{t}", "{ts}"), "noun": ("{v}",), "nothing": ("{v}", "{t}", "{ts}")}[alike]
    return [one for one in requests if any(word in one for word in wanted)]


def alike_skill(rng: Random, verb: str, noun: str, form: Form, alike: str) -> Skill:
    """Compose a skill from a verb, a noun and a form."""
    both = f"{verb}_{noun}"
    name = rng.choice(
        {"verb": (both, both, noun), "noun": (both, both, verb)}.get(alike, (both, noun, verb))
    )
    other = sample_word(rng)
    description = rng.choice(
        (
            f"{verb} {article(noun)}.", f"{verb} the {noun}.", f"{verb} {plural(noun)}.",
            f"{verb} {article(noun)} of {article(other)}.", f"{verb} the {noun} in the {other}.",
            f"{verb} some {plural(noun)} of the {other}.", f"the {noun} to {verb}.",
        )
    )  # fmt: skip
    fields = [sample_field("number" if kind == NUMERAL else kind, rng) for kind in form.kinds]
    while len(set(fields)) < len(fields):
        fields[1] = sample_word(rng)
    slots = dict(zip("ab", (f"{{{field}}}" for field in fields), strict=False))
    chosen = rng.sample(_usable(form.requests, alike), 3)
    requests = tuple(
        first_up(text.format(v=verb, t=noun, ts=plural(noun), **slots)) for text in chosen
    )
    ordered = list(zip(fields, form.kinds, strict=True))
    if "number" in form.kinds and rng.random() < 0.5:  # their types tell them apart
        ordered.reverse()
    return Skill(name, first_up(description), dict(ordered), requests)


def _verb(rng: Random) -> str:
    if rng.random() < 0.15:
        return made_up_word(rng)
    return rng.choice(verbs("transitive") + verbs("irregular")).base


def alike_skills(rng: Random, count: int) -> list[Skill]:
    """Draw skills of different names that share a verb, a noun or nothing but the form."""
    alike = rng.choice(KINDS_ALIKE) if count > 1 else "nothing"
    verb, noun, form = _verb(rng), sample_word(rng), sample_form(rng, alike)
    same_form = rng.random() < 0.5
    found: dict[str, Skill] = {}
    while len(found) < count:
        if rng.random() < 0.15:
            known = rng.choice(SKILLS)
            skill = known if rng.random() < 0.3 else renamed(known, rng)
        else:
            skill = alike_skill(
                rng,
                verb if alike == "verb" else _verb(rng),
                noun if alike == "noun" else sample_word(rng),
                form if same_form else sample_form(rng, alike),
                alike,
            )
        found.setdefault(skill.name, skill)
    return list(found.values())


def choosing_conversation(rng: Random, mix: Mix) -> Conversation:
    """Write calls of each of one to three tools that are alike, beside `draw` at times."""
    writer = ConversationWriter(rng, mix)
    skills = alike_skills(rng, rng.choice((1, 1, 2, 2, 2, 3)))
    can_draw = rng.random() < 0.15
    declared = [
        declaration(skill, rng, alone=len(skills) == 1 and not can_draw) for skill in skills
    ]
    if can_draw:
        declared.insert(rng.randint(0, len(declared)), draw_tool(rng))
    writer.system(share=0.15)
    calls = rng.sample(skills, len(skills))
    calls += [rng.choice(skills)] * (rng.random() < 0.3)
    for skill in calls:
        if rng.random() < 0.06:
            add_talk(writer)
        if can_draw and rng.random() < 0.3:
            add_drawing(writer)
        add_call(writer, skill)
    if rng.random() < 0.7:
        del writer.messages[-2:]  # the call is the last turn
    return writer.finish(declared=tuple(declared))
