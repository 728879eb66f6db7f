"""How a conversation of the pocket-chat model is written: scenes, small talk and drawing, turn by turn.

Which conversations are for training and which are held out is decided in `chat_stream`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import Any

import chat_talk as talk
import chat_tools as tools
from chat_edits import instruct
from chat_mix import BROAD, Mix
from chat_tools import Message
from world import ARRANGEMENTS, Arrangement, Scene, canonical, describe, sample_scene
from world_questions import ASKERS

SYSTEMS = (
    *(
        "You are a helpful assistant.",
        "You are a helpful assistant.",
        "You are Pocket.",
        "Answer briefly.",
        "Be brief.",
    ),
    *(
        "You are a friendly assistant.",
        "You are a voice assistant. Keep answers short.",
        "You are an AI assistant.",
    ),
    *(
        "You are a helpful assistant that can see shapes.",
        "Be polite and short.",
        "Help the user.",
        "Speak English.",
    ),
    *(
        "You are a careful assistant. Answer in one sentence.",
        "You can draw pictures with tools.",
        "Be concise.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages in the chat-template form, the declared tools, and the texts by which held-out ones are told apart."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    category: str = "mixed"
    keys: frozenset[str] = field(default_factory=frozenset)


def digest(text: str) -> str:
    return blake2b(text.lower().strip(" .?!").encode(), digest_size=8).hexdigest()


def casual(text: str, rng: Random) -> str:
    """The text as people type or as speech recognition writes it: often in lower case, without punctuation."""
    draw = rng.random()
    if draw < 0.12:
        return text.lower()
    if draw < 0.2:
        return text.rstrip(".?!")
    if draw < 0.3:
        return text.lower().replace(",", "").rstrip(".?!")
    if draw < 0.34:
        return f"{rng.choice(('Please', 'Ok', 'So', 'Now', 'Hey', 'Well'))}, {text[:1].lower()}{text[1:]}"
    return text


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def weighted(rng: Random, weights: dict[str, float]) -> str:
    """One key at random; a single key takes no randomness."""
    return (
        next(iter(weights))
        if len(weights) == 1
        else rng.choices(list(weights), list(weights.values()))[0]
    )


class Writer:
    """Writes one conversation turn by turn, collecting the keys of scenes and questions it uses."""

    def __init__(self, rng: Random, mix: Mix, *, plain: bool = False) -> None:
        self.rng = rng
        self.mix = mix
        self.plain = plain  # no lower case, no missing punctuation
        self.messages: list[Message] = []
        self.keys: set[str] = set()
        self.scene: Scene | None = None
        self.pending = ""  # scene text that goes in front of the next user turn

    def system(self, text: str = "", *, share: float = 0.4) -> None:
        if self.rng.random() < share:
            text = f"{self.rng.choice(SYSTEMS)} {text}".strip()
        if text:
            self.messages.append({"role": "system", "content": text})

    def exchange(self, text: str, answer: str) -> None:
        text = text if self.plain else casual(text, self.rng)
        if self.pending:
            text = f"{self.pending}{self.rng.choice((' ', ' ', chr(10)))}{text}"
            self.pending = ""
        self.messages += [user(text), assistant(answer)]

    def set_scene(self, scene: Scene) -> None:
        self.scene = scene
        if len(scene.things) > 1:
            self.keys.add(digest(canonical(scene)))

    def ask(self, category: str) -> bool:
        """One exchange about the scene; False if the scene does not allow this category."""
        assert self.scene is not None
        if category == "instruction":
            edit = instruct(self.scene, self.rng)
            if edit is None or (not edit.scene.things and self.rng.random() < 0.7):
                return False
            self.exchange(edit.text, edit.answer)
            self.set_scene(edit.scene)
            return True
        question = ASKERS[category](self.scene, self.rng)
        if question is None:
            return False
        self.exchange(question.text, question.answer)
        return True

    def talk(self, category: str, *, held_out: bool = False) -> None:
        """One exchange that needs no scene."""
        if category == "no-scene" and self.scene is None:
            question = talk.no_scene(self.rng)
        else:
            category = category.replace("no-scene", "small-talk")
            question = talk.question(category, self.rng, held_out=held_out)
        self.keys.add(digest(question.text))
        self.exchange(question.text, question.answer)

    def done(
        self, category: str = "mixed", declared: tuple[dict[str, Any], ...] = ()
    ) -> Conversation:
        return Conversation(
            messages=tuple(self.messages),
            tools=declared,
            category=category,
            keys=frozenset(self.keys),
        )


def introduce(writer: Writer, scene: Scene, *, first: bool = True) -> None:
    """Tell the scene in the system message, in a turn of its own, or in front of the next question."""
    rng, text = writer.rng, describe(scene, writer.rng)
    if rng.random() < 0.25:
        text = casual(text, rng)
        text += "" if text.endswith(".") else rng.choice((".", ".", ""))
    writer.set_scene(scene)
    draw = rng.random()
    if first and draw < 0.2:
        writer.system(text)
        return
    if first:
        writer.system()
    if draw < 0.45:
        writer.exchange(text, rng.choice(("I see.", "I see.")))
    else:
        writer.pending = text


def scene_talk(
    rng: Random, mix: Mix = BROAD, *, category: str | None = None
) -> Conversation | None:
    """Questions and instructions about a scene; with `category`, a single question of that category."""
    only: dict[str | None, Arrangement] = {
        "relation-horizontal": "row",
        "relation-vertical": "column",
    }
    writer = Writer(rng, mix)
    arrangement = only.get(category) or rng.choice(ARRANGEMENTS)
    introduce(writer, sample_scene(rng, arrangement=arrangement, least=2 if category else 1))
    if category:
        return writer.done(category) if writer.ask(category) else None
    turns = rng.choice((2, 3, 4, 5, 6, 8, 8)) if rng.random() < 0.95 else rng.randint(10, 28)
    for _ in range(turns):
        writer.ask(weighted(rng, mix.scene))
        draw = rng.random()
        if draw < 0.05:
            writer.talk(weighted(rng, mix.talk))
        elif draw < 0.12 and not writer.pending:
            introduce(writer, sample_scene(rng), first=False)
    return writer.done() if any(m["role"] == "assistant" for m in writer.messages) else None


def lesson(rng: Random, mix: Mix) -> Conversation:
    """An easy conversation for the start of training: few things, whole sentences, one question after another."""
    writer = Writer(rng, mix, plain=True)
    if rng.random() < 0.2:
        for _ in range(6):
            writer.talk(weighted(rng, mix.talk))
        return writer.done()
    scene = sample_scene(
        rng, least=2, most=rng.choice((2, 3, 3)), sized=rng.choice((0.0, 0.0, 0.5))
    )
    writer.set_scene(scene)
    writer.pending = describe(scene, rng)
    for _ in range(rng.randint(4, 8)):
        writer.ask(weighted(rng, mix.scene))
    return writer.done() if writer.messages else lesson(rng, mix)


def plain_talk(
    rng: Random, mix: Mix = BROAD, *, category: str | None = None, held_out: bool = False
) -> Conversation:
    """Turns that need no scene; `held_out` turns use names and topic words that training lacks."""
    writer = Writer(rng, mix)
    writer.system()
    for _ in range(1 if category else rng.choice((1, 2, 3, 4, 6, 8))):
        writer.talk(category or weighted(rng, mix.talk), held_out=held_out)
    return writer.done(category or "mixed")


def draw_talk(rng: Random, mix: Mix = BROAD, *, single: bool = False) -> Conversation:
    """Requests for a picture, with the tool declared (a call) or not (a polite no), among other turns.

    With `single` just one request, for at least two kinds of things.
    """
    writer = Writer(rng, mix)
    declared = [tools.other_tool(rng)] if rng.random() < 0.2 else []
    can_draw = rng.random() < 0.75
    if can_draw:
        declared.insert(rng.randint(0, len(declared)), tools.draw_tool(rng))
    writer.system()
    if single:
        _draw_turn(writer, tools.drawable(rng, least=2), can_draw, finish=False)
        return writer.done("tool-call", tuple(declared))
    for _ in range(rng.choice((1, 2, 3, 4, 5))):
        draw = rng.random()
        if draw < 0.6:
            _draw_turn(writer, tools.drawable(rng), can_draw)
        elif draw < 0.72:
            scene = sample_scene(rng, arrangement="scatter")
            introduce(writer, scene, first=False)
            _draw_turn(writer, tools.drawing_of(scene), can_draw, ask=rng.choice(tools.ASK_SCENE))
        elif draw < 0.85:
            introduce(writer, sample_scene(rng), first=False)
            if not writer.ask(weighted(rng, mix.scene)):
                writer.ask("description")
        else:
            writer.talk(weighted(rng, mix.talk))
    return writer.done(declared=tuple(declared))


def _draw_turn(
    writer: Writer, what: str, can_draw: bool, *, ask: str = "", finish: bool = True
) -> None:
    rng = writer.rng
    if not ask:
        writer.keys.add(digest(f"draw {what}"))
    text = casual(ask or tools.ask_to_draw(what, rng), rng)
    if not ask and what not in text:  # the request lost its commas, so the prompt has none either
        what = what.replace(",", "")
    if writer.pending:
        text, writer.pending = f"{writer.pending} {text}", ""
    writer.messages.append(user(text))
    if not can_draw:
        writer.messages.append(assistant(tools.NO_DRAW))
        return
    writer.messages.append(tools.call(what))
    if finish:
        reply, sentence = tools.result(rng, what)
        writer.messages += [reply, assistant(sentence)]
