"""Count and list tokens: a chat or a raw prompt in, its token ids out; and token ids in, text out.

    count = await count_tokens(bus, Chat(model="pocket-chat", messages=…, sampling=Sampling()))

The counts are exact: the tokenizer makes the same prompt as for a reply, images included. If it
dies, another one begins again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from motet_shared.messages import (
    Body,
    Chat,
    Complete,
    Detokenize,
    End,
    Text,
    TokenIds,
    Tokenize,
)
from motet_shared.wire.bus import Bus
from motet_shared.wire.failover import Failover, StreamMoves

ROLE = "tokenizer"


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """Token ids of a prompt; `pieces` is the text of each, if it was requested."""

    ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)


async def count_tokens(
    bus: Bus, prompt: Chat | Complete, *, deadline: float | None = None, patience: float = 5.0
) -> int:
    """Return how many tokens a prompt has. `deadline` and `patience` are those of `chat`."""
    request = Tokenize(prompt=prompt, count_only=True)
    _, end = await _collect(bus, request, prompt.model, deadline, patience)
    return end.usage.prompt_tokens if end.usage is not None else 0


async def tokenize(
    bus: Bus, request: Tokenize, *, deadline: float | None = None, patience: float = 5.0
) -> TokenizedPrompt:
    """Return the token ids of a prompt."""
    items, _ = await _collect(bus, request, request.prompt.model, deadline, patience)
    found = TokenizedPrompt()
    for item in cast(list[TokenIds], items):
        found.ids.extend(item.ids)
        found.pieces.extend(item.pieces)
    return found


async def detokenize(
    bus: Bus, request: Detokenize, *, deadline: float | None = None, patience: float = 5.0
) -> str:
    """Return the text of token ids, special tokens by their names."""
    items, _ = await _collect(bus, request, request.model, deadline, patience)
    return "".join([item.text for item in cast(list[Text], items)])


async def _collect(
    bus: Bus,
    request: Tokenize | Detokenize,
    model: str,
    deadline: float | None,
    patience: float,
) -> tuple[list[Body], End]:
    """Return all items of a request and its end, from the first instance that completes it."""
    base = bus.directory.base_of(model)  # tokenizers do not announce adapters
    moves = Failover(
        bus,
        ROLE,
        base,
        StreamMoves(),
        lambda: 0,
        patience=patience,
        deadline=deadline,
        what="prompt",
    )
    while True:
        async with moves as instance:
            items: list[Body] = []
            async with bus.open(ROLE, request, instance=instance, deadline=moves.left()) as stream:
                async for item in stream:
                    items.append(item)
            return items, stream.end or End(0, 0)
