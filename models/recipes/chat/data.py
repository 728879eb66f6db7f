"""Write pocket-chat conversations turn by turn: scenes, small talk and drawing.

`chat.stream` decides which conversations are for training and which are held out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import Any

from recipes.chat import talk, tools
from recipes.chat.edits import instruct
from recipes.chat.mix import BROAD, Mix
from recipes.chat.tools import Message
from recipes.world.questions import QUESTION_MAKERS
from recipes.world.scenes import ARRANGEMENTS, Arrangement, Scene, canonical, describe, sample_scene

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
    """Hold messages in chat-template form and the declared tools.

    keys: digests of its scenes and question texts, by which held-out conversations are excluded.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    category: str = "mixed"
    keys: frozenset[str] = field(default_factory=frozenset)


def digest(text: str) -> str:
    """Hash a text without case and final punctuation."""
    return blake2b(text.lower().strip(" .?!").encode(), digest_size=8).hexdigest()


def casual(text: str, rng: Random) -> str:
    """Return the text as typed or recognized: often in lower case or without punctuation."""
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
    """Make a user message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """Make an assistant message."""
    return {"role": "assistant", "content": text}


def weighted_choice(rng: Random, weights: dict[str, float]) -> str:
    """Return one key at random; a single key draws no random number."""
    return (
        next(iter(weights))
        if len(weights) == 1
        else rng.choices(list(weights), list(weights.values()))[0]
    )


class ConversationWriter:
    """Write one conversation and collect the digests of its scenes and questions."""

    def __init__(self, rng: Random, mix: Mix, *, plain: bool = False) -> None:
        self.rng = rng
        self.mix = mix
        self.plain = plain  # without the changes of `casual`
        self.messages: list[Message] = []
        self.keys: set[str] = set()
        self.scene: Scene | None = None
        self.pending = ""  # scene description to prefix to the next user turn

    def system(self, text: str = "", *, share: float = 0.4) -> None:
        """Add a system message, with a default text in `share` of the cases."""
        if self.rng.random() < share:
            text = f"{self.rng.choice(SYSTEMS)} {text}".strip()
        if text:
            self.messages.append({"role": "system", "content": text})

    def exchange(self, text: str, answer: str) -> None:
        """Add a user turn and its answer."""
        text = text if self.plain else casual(text, self.rng)
        if self.pending:
            text = f"{self.pending}{self.rng.choice((' ', ' ', chr(10)))}{text}"
            self.pending = ""
        self.messages += [user(text), assistant(answer)]

    def set_scene(self, scene: Scene) -> None:
        """Set the scene that later questions refer to."""
        self.scene = scene
        if len(scene.things) > 1:
            self.keys.add(digest(canonical(scene)))

    def ask(self, category: str) -> bool:
        """Add one exchange about the scene; return False if the scene does not allow the category."""
        assert self.scene is not None
        if category == "instruction":
            edit = instruct(self.scene, self.rng)
            if edit is None or (not edit.scene.things and self.rng.random() < 0.7):
                return False
            self.exchange(edit.text, edit.answer)
            self.set_scene(edit.scene)
            return True
        question = QUESTION_MAKERS[category](self.scene, self.rng)
        if question is None:
            return False
        self.exchange(question.text, question.answer)
        return True

    def talk(self, category: str, *, held_out: bool = False) -> None:
        """Add one exchange that needs no scene."""
        if category == "no-scene" and self.scene is None:
            question = talk.no_scene(self.rng)
        else:
            category = category.replace("no-scene", "small-talk")
            question = talk.question(category, self.rng, held_out=held_out)
        self.keys.add(digest(question.text))
        self.exchange(question.text, question.answer)

    def finish(
        self, category: str = "mixed", declared: tuple[dict[str, Any], ...] = ()
    ) -> Conversation:
        """Return the conversation."""
        return Conversation(
            messages=tuple(self.messages),
            tools=declared,
            category=category,
            keys=frozenset(self.keys),
        )


def introduce_scene(writer: ConversationWriter, scene: Scene, *, first: bool = True) -> None:
    """Describe the scene in the system message, in its own turn, or before the next question."""
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


def scene_conversation(
    rng: Random, mix: Mix = BROAD, *, category: str | None = None
) -> Conversation | None:
    """Write questions and instructions about a scene; with `category`, one question of it.

    Returns None if the scene does not allow the category.
    """
    only: dict[str | None, Arrangement] = {
        "relation-horizontal": "row",
        "relation-vertical": "column",
    }
    writer = ConversationWriter(rng, mix)
    arrangement = only.get(category) or rng.choice(ARRANGEMENTS)
    introduce_scene(
        writer, sample_scene(rng, arrangement=arrangement, min_things=2 if category else 1)
    )
    if category:
        return writer.finish(category) if writer.ask(category) else None
    turns = rng.choice((2, 3, 4, 5, 6, 8, 8)) if rng.random() < 0.95 else rng.randint(10, 28)
    for _ in range(turns):
        writer.ask(weighted_choice(rng, mix.scene))
        draw = rng.random()
        if draw < 0.05:
            writer.talk(weighted_choice(rng, mix.talk))
        elif draw < 0.12 and not writer.pending:
            introduce_scene(writer, sample_scene(rng), first=False)
    return writer.finish() if any(m["role"] == "assistant" for m in writer.messages) else None


def easy_conversation(rng: Random, mix: Mix) -> Conversation:
    """Write an easy conversation for the start of training: few things, whole sentences."""
    writer = ConversationWriter(rng, mix, plain=True)
    if rng.random() < 0.2:
        for _ in range(6):
            writer.talk(weighted_choice(rng, mix.talk))
        return writer.finish()
    scene = sample_scene(
        rng, min_things=2, max_things=rng.choice((2, 3, 3)), sized=rng.choice((0.0, 0.0, 0.5))
    )
    writer.set_scene(scene)
    writer.pending = describe(scene, rng)
    for _ in range(rng.randint(4, 8)):
        writer.ask(weighted_choice(rng, mix.scene))
    return writer.finish() if writer.messages else easy_conversation(rng, mix)


def plain_conversation(
    rng: Random, mix: Mix = BROAD, *, category: str | None = None, held_out: bool = False
) -> Conversation:
    """Write turns that need no scene; `held_out` ones use names and topics that training lacks."""
    writer = ConversationWriter(rng, mix)
    writer.system()
    for _ in range(1 if category else rng.choice((1, 2, 3, 4, 6, 8))):
        writer.talk(category or weighted_choice(rng, mix.talk), held_out=held_out)
    return writer.finish(category or "mixed")


def drawing_conversation(rng: Random, mix: Mix = BROAD, *, single: bool = False) -> Conversation:
    """Write requests for a picture among other turns, with the tool declared or declined.

    single: one request only, for at least two kinds of things.
    """
    writer = ConversationWriter(rng, mix)
    declared = [tools.other_tool(rng)] if rng.random() < 0.2 else []
    can_draw = rng.random() < 0.75
    if can_draw:
        declared.insert(rng.randint(0, len(declared)), tools.draw_tool(rng))
    writer.system()
    if single:
        _add_drawing_turn(writer, tools.drawing_prompt(rng, min_things=2), can_draw, finish=False)
        return writer.finish("tool-call", tuple(declared))
    for _ in range(rng.choice((1, 2, 3, 4, 5))):
        draw = rng.random()
        if draw < 0.6:
            _add_drawing_turn(writer, tools.drawing_prompt(rng), can_draw)
        elif draw < 0.72:
            scene = sample_scene(rng, arrangement="scatter")
            introduce_scene(writer, scene, first=False)
            _add_drawing_turn(
                writer, tools.scene_prompt(scene), can_draw, ask=rng.choice(tools.SCENE_REQUESTS)
            )
        elif draw < 0.85:
            introduce_scene(writer, sample_scene(rng), first=False)
            if not writer.ask(weighted_choice(rng, mix.scene)):
                writer.ask("description")
        else:
            writer.talk(weighted_choice(rng, mix.talk))
    return writer.finish(declared=tuple(declared))


def _add_drawing_turn(
    writer: ConversationWriter, what: str, can_draw: bool, *, ask: str = "", finish: bool = True
) -> None:
    rng = writer.rng
    if not ask:
        writer.keys.add(digest(f"draw {what}"))
    text = casual(ask or tools.drawing_request(what, rng), rng)
    if not ask and what not in text:  # `casual` dropped the commas: drop them from the prompt too
        what = what.replace(",", "")
    if writer.pending:
        text, writer.pending = f"{writer.pending} {text}", ""
    writer.messages.append(user(text))
    if not can_draw:
        writer.messages.append(assistant(tools.CANNOT_DRAW))
        return
    writer.messages.append(tools.draw_call(what))
    if finish:
        reply, sentence = tools.draw_result(rng, what)
        writer.messages += [reply, assistant(sentence)]
