"""Which conversations train the model and which are held out.

A conversation is a pure function of (seed, index). Training refuses the held-out seeds, and drops every
conversation that contains a scene or a question text of the held-out set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from random import Random

from chat_data import Conversation, digest, draw_talk, lesson, plain_talk, scene_talk, weighted
from chat_mix import BROAD, Mix

HELD_OUT_SEEDS = range(900_000_000, 1_000_000_000)
PER_CATEGORY = 250

SCENE_CATEGORIES = (
    *("count", "colour", "shape", "size", "existence", "relation-horizontal", "relation-vertical"),
    *("description", "instruction"),
)
TALK_CATEGORIES = ("arithmetic", "counting", "small-talk", "refusal")
CATEGORIES = (*SCENE_CATEGORIES, *TALK_CATEGORIES, "tool-call")


def _candidate(category: str, rng: Random) -> Conversation | None:
    if category in SCENE_CATEGORIES:
        return scene_talk(rng, category=category)
    if category == "tool-call":
        return draw_talk(rng, single=True)
    made = plain_talk(rng, category=category, held_out=True)
    # Only a quarter of the texts may be held out, so that training keeps most ways to say each of the few facts.
    return made if all(int(key, 16) % 4 == 0 for key in made.keys) else None


def _held_out(category: str, count: int) -> Iterator[Conversation]:
    seen: set[str] = set()
    for seed in HELD_OUT_SEEDS:
        made = _candidate(category, Random(f"{seed}/{category}"))
        text = digest("\n".join(message["content"] for message in made.messages)) if made else ""
        if made and text not in seen:
            seen.add(text)
            yield made
            if len(seen) == count:
                return


@cache
def held_out() -> dict[str, tuple[Conversation, ...]]:
    """The held-out conversations by category; the last message of each is the right answer."""
    return {category: tuple(_held_out(category, PER_CATEGORY)) for category in CATEGORIES}


@cache
def blocked() -> frozenset[str]:
    """The digests of all scenes and question texts in the held-out set."""
    return frozenset(key for made in held_out().values() for item in made for key in item.keys)


_MAKERS: dict[str, Callable[[Random, Mix], Conversation | None]] = {
    "lesson": lesson,
    "scene": scene_talk,
    "talk": plain_talk,
    "draw": draw_talk,
}


def conversation(seed: int, index: int, *, mix: Mix = BROAD) -> Conversation:
    """The training conversation number `index` of `seed` from a mix; raises ValueError for a held-out seed."""
    if seed in HELD_OUT_SEEDS:
        raise ValueError(
            f"seed {seed} is held out for evaluation: train with one below {HELD_OUT_SEEDS.start}"
        )
    rng = Random(f"{seed}/{index}")
    while True:
        made = _MAKERS[weighted(rng, mix.kinds)](rng, mix)
        if made and not made.keys & blocked():
            return made
