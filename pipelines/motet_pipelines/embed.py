"""Embed: texts in, their vectors out, with failover between embedding services.

    async with aclosing(embed(bus, Embed(model="pocket-embed", input=["a red circle"]))) as parts:
        async for part in parts:
            print(part.count, part.data)

A long list is sent in several requests, one after the other. If the service dies, another one
continues at the first text without a vector, so none is lost or repeated. Leaving the generator
early is a remote cancel; `aclosing` makes that prompt.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import msgspec

from motet_shared.errors import StreamBroken
from motet_shared.messages import Embed, Vectors
from motet_shared.wire.bus import Bus

from .failover import Failover, StreamMoves

ROLE = "embedding"
PART = 256 * 1024  # most bytes of texts in one request, unless one text alone is larger
PART_TEXTS = 512  # most texts in one request


@dataclass(slots=True, kw_only=True)
class Embedded(StreamMoves):
    """Totals of an embedding request; complete once the generator has ended."""

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
    """Yield the vectors of the request's texts in order, several at a time.

    `deadline`: seconds for everything. `patience`: seconds without progress, in which an instance
    may appear or restart, before the last retryable error is raised. Other errors are raised at
    once.
    """
    outcome = outcome or Embedded()
    moves = Failover(
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
            part = msgspec.structs.replace(
                request, input=_part(request.input, first), first=request.first + first
            )
            async with bus.open(ROLE, part, instance=instance, deadline=moves.left()) as stream:
                async for item in stream:
                    if isinstance(item, Vectors):
                        outcome.texts += item.count
                        outcome.tokens += item.tokens
                        yield item
            if outcome.texts < first + len(part.input):
                raise StreamBroken(f"{instance} ended before all texts were embedded")


def _part(texts: Sequence[str | list[int]], first: int) -> list[str | list[int]]:
    """Return the texts from `first` on that fit into one request."""
    size, end = 0, first
    while end < len(texts):
        text = texts[end]
        # An upper bound of the bytes on the wire: 4 per character, and for most token ids.
        size += 4 * len(text) + 8
        if end > first and (size > PART or end - first == PART_TEXTS):
            break
        end += 1
    return list(texts[first:end])
