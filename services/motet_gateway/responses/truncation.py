"""Shorten a conversation that exceeds the context, from its beginning (`truncation: auto`)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec

from .chat_request import ChatRequest


def shorter(asked: ChatRequest, dropped: int) -> ChatRequest | None:
    """Return a chat without its oldest `dropped` groups of messages, None if nothing may go.

    A group is a turn of the user with all that follows it, or, within the last turn, a message of
    the assistant with the results of its calls. Instructions, the last message of the user and the
    last group stay, so that no result loses its call.
    """
    messages = asked.chat.messages
    groups = _groups(messages)
    if not groups:
        return None
    gone = {index for group in groups[:dropped] for index in group}
    pictures = iter(asked.pictures)
    shown = [[next(pictures) for _ in range(_images(message))] for message in messages]
    kept = [index for index in range(len(messages)) if index not in gone]
    request = msgspec.structs.replace(asked.chat, messages=[messages[index] for index in kept])
    # Messages beyond `params` are those that a chat adds for images of earlier replies.
    params = tuple(asked.params[index] for index in kept if index < len(asked.params))
    return asked.with_messages(request, [one for index in kept for one in shown[index]], params)


def _groups(messages: list[dict[str, Any]]) -> list[range]:
    """Return the groups of messages that may be dropped, the oldest first."""
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        return []
    turns = [range(*pair) for pair in pairwise(users)]
    starts = [
        index
        for index in range(users[-1] + 1, len(messages))
        if messages[index]["role"] == "assistant"
    ]
    return turns + [range(*pair) for pair in pairwise(starts)]


def _images(message: dict[str, Any]) -> int:
    """Return how many images a message shows."""
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    return sum(part["type"] == "image" for part in parts)
