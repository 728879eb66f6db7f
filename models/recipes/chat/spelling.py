"""Spell words of a conversation with calls anew, with pieces of the whole vocabulary.

Copying is learnt token by token: words that are made up of a few syllables teach it for their pieces
alone. A name, a field or a value of a call becomes a word of pieces drawn at random, wherever it is
written in the conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerFast

from recipes.chat.data import Conversation

RESPELLED_SHARE = 0.6  # of a conversation's words that calls copy
_KEPT = frozenset(
    "a an the of to for from at on in with and role content type text name user tool tools system assistant function"
    " parameters properties required object string integer boolean description arguments calls draw prompt"
    " additional strict false true null image".split()
)  # fmt: skip
_WORD = re.compile(r"[A-Za-z]+")


def pieces(tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    """Return the vocabulary's tokens of lower-case letters, without the space before them."""
    tokens = (token.removeprefix("Ġ") for token in tokenizer.get_vocab())
    return tuple(sorted({one for one in tokens if re.fullmatch(r"[a-z]{1,7}", one)}))


def spelled_word(rng: Random, known: tuple[str, ...]) -> str:
    """Return a word of one to three pieces, with three letters or more."""
    while True:
        word = "".join(rng.choices(known, k=rng.choice((1, 2, 2, 3))))
        if len(word) > 2 and word not in _KEPT:
            return word


def _copied(conversation: Conversation) -> Iterator[str]:
    """Yield the texts that calls copy: names, fields and values."""
    for message in conversation.messages:
        for call in message.get("tool_calls", ()):
            function: dict[str, Any] = call["function"]
            if function["name"] != "draw":
                yield function["name"]
                for field, value in function["arguments"].items():
                    yield field
                    yield str(value)


def respelled(conversation: Conversation, rng: Random, known: tuple[str, ...]) -> Conversation:
    """Return the conversation with some of the words that its calls copy spelled anew."""
    words = sorted({word.lower() for text in _copied(conversation) for word in _WORD.findall(text)})
    chosen = {
        word: spelled_word(rng, known)
        for word in words
        if len(word) > 1 and word not in _KEPT and rng.random() < RESPELLED_SHARE
    }

    def spelled(match: re.Match[str]) -> str:
        word = match[0]
        found = chosen.get(word.lower())
        if found is None:
            return word
        return found.capitalize() if word[0].isupper() else found

    told = json.dumps([conversation.messages, conversation.tools])
    messages, tools = json.loads(_WORD.sub(spelled, told))
    return replace(conversation, messages=tuple(messages), tools=tuple(tools))
