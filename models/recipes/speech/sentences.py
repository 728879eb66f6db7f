"""Draw sentences for the speech models: of the micro-world, of general English, held out.

A sentence is written the way it is spoken: numbers and signs in words. Whether it is held out
depends on its text alone, so that no seed can bring a held-out one into training.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from recipes.chat import talk as chat_talk
from recipes.chat import tools as chat_tools
from recipes.chat.edits import instruct
from recipes.speech.general import general
from recipes.speech.lexicon import number
from recipes.training.errors import RecipeError
from recipes.training.held_out_seeds import in_held_out_share
from recipes.world.scenes import describe, questions, sample_scene

HELD_OUT_SHARE = 32  # one sentence in HELD_OUT_SHARE is held out
SIGNS = {"+": "plus", "-": "minus", "*": "times", "x": "times", "/": "divided by", "=": "equals"}


class Utterance(NamedTuple):
    """Hold a sentence and its category."""

    category: str
    text: str


def spoken_form(text: str) -> str:
    """Write digits and signs in words: "What is 3+4?" reads "What is three plus four?"."""
    text = re.sub(r"(?<=\d)\s*([-+*/x=])(?=\s*\d|\s*$)", lambda m: f" {SIGNS[m[1]]} ", text)
    text = re.sub(r"\d+", lambda m: number(int(m[0])), text).replace("color", "colour")
    text = " ".join(text.split())
    return text[:1].upper() + text[1:]


def normalize_words(text: str) -> str:
    """Keep lower-case words and apostrophes, for word error rates and held-out hashes."""
    return " ".join(re.findall(r"[a-z']+", text.lower()))


def is_held_out(text: str) -> bool:
    """Return True if training excludes this sentence; never for one or two words."""
    words = normalize_words(text)
    return words.count(" ") > 1 and in_held_out_share(words, HELD_OUT_SHARE)


def _describe(rng: Random) -> str:
    return describe(sample_scene(rng), rng)


def _ask(rng: Random) -> str:
    return rng.choice(questions(sample_scene(rng), rng)).text


def _answer(rng: Random) -> str:
    return rng.choice(questions(sample_scene(rng), rng)).answer


def _instruct(rng: Random) -> str:
    edit = instruct(sample_scene(rng), rng)
    return edit.text if edit else _instruct(rng)


def _draw(rng: Random) -> str:
    return chat_tools.drawing_request(chat_tools.drawing_prompt(rng), rng)


def _talk(rng: Random) -> str:
    sentence = chat_talk.small_talk(rng)
    return sentence.answer if rng.random() < 0.2 else sentence.text


def _sums(rng: Random) -> str:
    made = rng.choice(
        (chat_talk.arithmetic, chat_talk.arithmetic, chat_talk.counting, chat_talk.too_large)
    )(rng)
    return made.answer if rng.random() < 0.3 else made.text


def _refuse(rng: Random) -> str:
    sentence = chat_talk.refusal(rng, held_out=rng.random() < 0.12)
    return sentence.answer if rng.random() < 0.05 else sentence.text


WORLD: dict[str, tuple[float, Callable[[Random], str]]] = {
    "description": (1.0, _describe),
    "question": (1.6, _ask),
    "answer": (0.6, _answer),
    "instruction": (1.2, _instruct),
    "drawing": (0.5, _draw),
    "small-talk": (0.7, _talk),
    "sums": (0.8, _sums),
    "refusal": (0.8, _refuse),
}
CATEGORIES = (*WORLD, "general")


def sample_sentence(rng: Random, category: str, *, held_out: bool = False) -> str:
    """Return a sentence of a category, held out or not. Raises RecipeError if unknown."""
    if category != "general" and category not in WORLD:
        raise RecipeError(
            f"category={category!r} is unknown: use one of {', '.join(CATEGORIES)}",
            param="category",
        )
    make = general if category == "general" else WORLD[category][1]
    while True:
        text = spoken_form(make(rng))
        if is_held_out(text) == held_out and len(text) > 1:
            return text


def training_utterance(rng: Random, *, general_share: float, long_share: float = 0.0) -> Utterance:
    """Return a training sentence; a `long_share` of them join two sentences."""
    weights = [weight for weight, _ in WORLD.values()]
    kind = "general" if rng.random() < general_share else rng.choices(list(WORLD), weights)[0]
    text = sample_sentence(rng, kind)
    while rng.random() < long_share and len(text) < 60:
        text = f"{text if text[-1] in '.?!' else text + '.'} {sample_sentence(rng, kind)}"
    return Utterance(kind, text)
