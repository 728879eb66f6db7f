"""Drop the oldest turns of a conversation that exceeds its limit, down to a share of the limit.

Several turns then fit before the next cut, so that the prompts in between have a common beginning,
which the prefix cache keeps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec

from motet_pipelines.chat.models import servable
from motet_pipelines.chat.tokens import count_tokens
from motet_shared.messages import Chat
from motet_shared.wire.bus import Bus

from .history import without_oldest
from .settings import ConversationLimits, Retention
from .user_sound import recorded_ms

_IMAGE_TOKENS = 256  # of an image, about; images and sound are encoded for the reply alone
_SOUND_TOKENS = 25  # of a second of sound: Whisper's frames, halved twice
_REPLY_TOKENS = 256  # room for a reply without a limit of its own


@dataclass(frozen=True, slots=True)
class _Counter:
    """Count tokens of prompts of one request, with other messages."""

    bus: Bus
    request: Chat
    limits: ConversationLimits

    async def count(self, messages: list[dict[str, Any]]) -> int:
        media, plain = 0.0, []
        for message in messages:
            content = message.get("content")
            if isinstance(content, list):
                texts = [part["text"] for part in content if part["type"] == "text"]
                media += sum(map(_media_tokens, content))
                message = {**message, "content": "\n".join(texts)}
            plain.append(message)
        tokens = await count_tokens(
            self.bus,
            msgspec.structs.replace(self.request, messages=plain),
            deadline=self.limits.request_timeout,
            patience=self.limits.patience,
        )
        return tokens + math.ceil(media)


async def retained(
    bus: Bus, request: Chat, retention: Retention, limits: ConversationLimits
) -> list[dict[str, Any]]:
    """Return the messages of a request, without the oldest turns if they exceed the limit.

    Instructions and tools do not count, and the last turn stays. Raises MotetError if the tokens
    cannot be counted.
    """
    messages = request.messages
    counter = _Counter(bus, request, limits)
    first = messages[:1] if messages and messages[0]["role"] == "system" else []
    fixed = await counter.count([*first, {"role": "user", "content": ""}])
    limit = retention.tokens or _room(bus, request, fixed)
    if not limit or await counter.count(messages) - fixed <= limit:
        return messages
    return await _shortened(counter, messages, int(limit * retention.ratio) + fixed)


def _media_tokens(part: dict[str, Any]) -> float:
    """Return about how many tokens an image or a recording is; 0 for text."""
    if part["type"] == "audio":
        return recorded_ms(part) / 1000 * _SOUND_TOKENS
    return 0 if part["type"] == "text" else _IMAGE_TOKENS


async def _shortened(
    counter: _Counter, messages: list[dict[str, Any]], most: int
) -> list[dict[str, Any]]:
    """Return `messages` without as few of the oldest turns as have them fit into `most` tokens."""
    turns = sum(message["role"] == "user" for message in messages)
    low, high = 1, max(turns - 1, 1)  # turns to drop: too few below `low`, enough at `high`
    while low < high:
        dropped = (low + high) // 2
        shorter = without_oldest(messages, dropped) or messages
        if await counter.count(shorter) <= most:
            high = dropped
        else:
            low = dropped + 1
    return without_oldest(messages, high) or messages


def _room(bus: Bus, request: Chat, fixed: int) -> int:
    """Return the tokens that a conversation may have in the model's context; 0: unknown."""
    card = servable(bus.directory).get(request.model)
    if card is None:
        return 0
    context = min(card.context, request.max_context or card.context)
    reply = _REPLY_TOKENS if request.max_tokens is None else request.max_tokens
    return max(context - fixed - reply, 1)
