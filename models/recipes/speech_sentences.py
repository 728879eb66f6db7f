"""What is said to the speech models: sentences of the micro-world and of general English, and their held-out share.

A sentence is written the way it is spoken: numbers and signs in words. Whether a sentence may be trained on is a
property of its text alone, so that no seed can bring a held-out one back.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from hashlib import blake2b
from random import Random
from typing import NamedTuple

import chat_talk
import chat_tools
from chat_edits import instruct
from speech_general import general
from speech_lexicon import number
from world import describe, questions, sample_scene

HELD_OUT_SEEDS = range(900_000_000, 1_000_000_000)
HELD_OUT_SHARE = 32  # one sentence in so many is held out
SIGNS = {"+": "plus", "-": "minus", "*": "times", "x": "times", "/": "divided by", "=": "equals"}


class Said(NamedTuple):
    """One sentence and what kind of sentence it is."""

    category: str
    text: str


def spoken(text: str) -> str:
    """Digits and signs of sums in words: "What is 3+4?" reads "What is three plus four?"; one spelling."""
    text = re.sub(r"(?<=\d)\s*([-+*/x=])(?=\s*\d|\s*$)", lambda m: f" {SIGNS[m[1]]} ", text)
    text = re.sub(r"\d+", lambda m: number(int(m[0])), text).replace("color", "colour")
    text = " ".join(text.split())
    return text[:1].upper() + text[1:]


def plain(text: str) -> str:
    """Lower case, words and apostrophes only: what word error rates compare and what splits the sentences."""
    return " ".join(re.findall(r"[a-z']+", text.lower()))


def is_held_out(text: str) -> bool:
    """Whether training never hears this sentence. Sentences of one or two words are too few to be split."""
    words = plain(text)
    key = int.from_bytes(blake2b(words.encode(), digest_size=8).digest(), "big")
    return words.count(" ") > 1 and key % HELD_OUT_SHARE == 0


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
    return chat_tools.ask_to_draw(chat_tools.drawable(rng), rng)


def _talk(rng: Random) -> str:
    said = chat_talk.small_talk(rng)
    return said.answer if rng.random() < 0.2 else said.text


def _sums(rng: Random) -> str:
    made = rng.choice(
        (chat_talk.arithmetic, chat_talk.arithmetic, chat_talk.counting, chat_talk.too_large)
    )(rng)
    return made.answer if rng.random() < 0.3 else made.text


def _refuse(rng: Random) -> str:
    said = chat_talk.refusal(rng, held_out=rng.random() < 0.12)
    return said.answer if rng.random() < 0.05 else said.text


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


def say(rng: Random, category: str, *, held_out: bool = False) -> str:
    """A sentence of a category; either one that is held out or one that training may hear."""
    if category != "general" and category not in WORLD:
        raise ValueError(f"category {category!r} is unknown: use {', '.join(CATEGORIES)}")
    make = general if category == "general" else WORLD[category][1]
    while True:
        text = spoken(make(rng))
        if is_held_out(text) == held_out and len(text) > 1:
            return text


def utterance(rng: Random, *, general_share: float, long_share: float = 0.0) -> Said:
    """A training sentence; a `long_share` of them are two sentences in one breath."""
    weights = [weight for weight, _ in WORLD.values()]
    kind = "general" if rng.random() < general_share else rng.choices(list(WORLD), weights)[0]
    text = say(rng, kind)
    while rng.random() < long_share and len(text) < 60:
        text = f"{text if text[-1] in '.?!' else text + '.'} {say(rng, kind)}"
    return Said(kind, text)
