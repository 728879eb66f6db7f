"""Embed: texts in, their vectors out, from whichever embedding service is alive.

    async with aclosing(embed(bus, Embed(model="pocket-embed", input=["a red circle"]))) as parts:
        async for part in parts:
            print(part.count, part.data)

A long list goes out in several requests, one after the other. If the service dies, another one goes on at the first
text without a vector, so none is lost or repeated. Leaving the generator early is a remote cancel; `aclosing` makes
that prompt.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import msgspec

from motet_shared.bus import Bus
from motet_shared.errors import StreamBroken
from motet_shared.messages import Embed, Vectors

from .moves import Moved, Moves

ROLE = "embedding"
PART = 256 * 1024  # bytes of texts in one request, or one text alone
PART_TEXTS = 512  # most of them


@dataclass(slots=True, kw_only=True)
class Embedded(Moved):
    """What there is to know of a request besides its vectors; complete once the generator has ended."""

    texts: int = 0
    tokens: int = 0


async def embed(
    bus: Bus,
    request: Embed,
    outcome: Embedded | None = None,
    *,
    deadline: float | None = None,
    patience: float = 5.0,
) -> AsyncGenerator[Vectors, None]:
    """Yield the vectors of the request's texts in order, some at a time.

    `deadline`: seconds for all of it. `patience`: seconds without progress, in which an instance may appear or restart,
    before the last retryable error is raised. Other errors are raised at once.
    """
    outcome = outcome or Embedded()
    moves = Moves(
        bus,
        ROLE,
        request.model,
        outcome,
        lambda: outcome.texts,
        patience=patience,
        deadline=deadline,
        what="embedding",
    )
    count = len(request.input)
    while outcome.texts < count:
        async with moves as instance:
            first = outcome.texts
            part = msgspec.structs.replace(request, input=_part(request.input, first), first=request.first + first)
            async with bus.open(ROLE, part, instance=instance, deadline=moves.left()) as stream:
                async for item in stream:
                    if isinstance(item, Vectors):
                        outcome.texts += item.count
                        outcome.tokens += item.tokens
                        yield item
            if outcome.texts < first + len(part.input):
                raise StreamBroken(f"{instance} ended before all texts were embedded")


def _part(texts: Sequence[str | list[int]], first: int) -> list[str | list[int]]:
    """The texts from `first` on, as far as they go into one request."""
    size, end = 0, first
    while end < len(texts):
        text = texts[end]
        size += 4 * len(text) + 8  # bytes on the wire at most: of a character, and of most token ids
        if end > first and (size > PART or end - first == PART_TEXTS):
            break
        end += 1
    return list(texts[first:end])
