"""Embed: texts or pictures in, their vectors out, with failover between embedding services.

    async with aclosing(embed(bus, Embed(model="pocket-embed", input=["a red circle"]))) as parts:
        async for part in parts:
            print(part.count, part.data)

A long list is sent in several requests, one after the other. If the service dies, another one
continues at the first text without a vector, so none is lost or repeated. Leaving the generator
early is a remote cancel; `aclosing` makes that prompt.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec

from motet_shared.errors import StreamBroken
from motet_shared.messages import Embed, Vectors
from motet_shared.wire.bus import Bus
from motet_shared.wire.failover import Failover, StreamMoves

from .parts import part_end

ROLE = "embedding"
_PICTURE = 128  # length that stands for a picture, of which only a reference is sent


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
    """Yield the vectors of the request's texts and pictures in order, several at a time.

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
    lengths = [len(text) for text in request.input] + [_PICTURE] * len(request.pictures)
    while outcome.texts < len(lengths):
        async with moves as instance:
            first = outcome.texts
            end = part_end(lengths, first)
            part = _part(request, first, end)
            async with bus.open(ROLE, part, instance=instance, deadline=moves.left()) as stream:
                begun = b""  # vectors of a text of which more are to come
                async for item in stream:
                    if isinstance(item, Vectors):
                        begun += item.data
                        if not item.count:
                            continue
                        outcome.texts += item.count
                        outcome.tokens += item.tokens
                        yield msgspec.structs.replace(item, data=begun)
                        begun = b""
            if outcome.texts < end:
                raise StreamBroken(f"{instance} ended before all texts were embedded")


def _part(request: Embed, first: int, end: int) -> Embed:
    """Return the request for the texts, and then pictures, from `first` to `end`."""
    texts = len(request.input)
    return msgspec.structs.replace(
        request,
        input=request.input[first:end],
        pictures=request.pictures[max(0, first - texts) : max(0, end - texts)],
        first=request.first + first,
    )
