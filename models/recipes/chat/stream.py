"""Separate training conversations from held-out ones.

A conversation is a pure function of (seed, index). Training refuses the held-out seeds, and drops
every conversation that contains a scene or a question text of the held-out set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from random import Random

from recipes.chat.data import (
    Conversation,
    digest,
    drawing_conversation,
    easy_conversation,
    plain_conversation,
    scene_conversation,
    weighted_choice,
)
from recipes.chat.mix import BROAD, Mix
from recipes.training.held_out_seeds import HELD_OUT_SEEDS, check_training_seed

PER_CATEGORY = 250

SCENE_CATEGORIES = (
    *("count", "colour", "shape", "size", "existence", "relation-horizontal", "relation-vertical"),
    *("description", "instruction"),
)
TALK_CATEGORIES = ("arithmetic", "counting", "small-talk", "refusal")
CATEGORIES = (*SCENE_CATEGORIES, *TALK_CATEGORIES, "tool-call")


def _candidate(category: str, rng: Random) -> Conversation | None:
    if category in SCENE_CATEGORIES:
        return scene_conversation(rng, category=category)
    if category == "tool-call":
        return drawing_conversation(rng, single=True)
    conversation = plain_conversation(rng, category=category, held_out=True)
    # Hold out at most a quarter of the texts, so that training keeps most wordings of each fact.
    return conversation if all(int(key, 16) % 4 == 0 for key in conversation.keys) else None


def _held_out(category: str, count: int) -> Iterator[Conversation]:
    texts: set[str] = set()
    for seed in HELD_OUT_SEEDS:
        conversation = _candidate(category, Random(f"{seed}/{category}"))
        text = (
            digest("\n".join(message["content"] for message in conversation.messages))
            if conversation
            else ""
        )
        if conversation and text not in texts:
            texts.add(text)
            yield conversation
            if len(texts) == count:
                return


@cache
def held_out() -> dict[str, tuple[Conversation, ...]]:
    """Return the held-out conversations by category; each ends in the expected answer."""
    return {category: tuple(_held_out(category, PER_CATEGORY)) for category in CATEGORIES}


@cache
def held_out_digests() -> frozenset[str]:
    """Return the digests of all scenes and question texts in the held-out set."""
    return frozenset(key for items in held_out().values() for item in items for key in item.keys)


_MAKERS: dict[str, Callable[[Random, Mix], Conversation | None]] = {
    "lesson": easy_conversation,
    "scene": scene_conversation,
    "talk": plain_conversation,
    "draw": drawing_conversation,
}


def training_conversation(seed: int, index: int, *, mix: Mix = BROAD) -> Conversation:
    """Return conversation `index` of `seed`. Raises RecipeError for a held-out seed."""
    check_training_seed(seed)
    rng = Random(f"{seed}/{index}")
    while True:
        conversation = _MAKERS[weighted_choice(rng, mix.kinds)](rng, mix)
        if conversation and not conversation.keys & held_out_digests():
            return conversation
