"""Rank: queries and documents in, scores out, with failover between ranking services.

    request = Rank(model="reranker", queries=["a circle"], documents=["a red circle", "a star"])
    async with aclosing(rank(bus, request)) as parts:
        scores = [score async for part in parts for score in part.values]

A long list of documents is sent in several requests, one after the other. If the service dies,
another one continues at the first document without a score. Leaving the generator early is a remote
cancel; `aclosing` makes that prompt.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec

from motet_shared.errors import StreamBroken
from motet_shared.messages import Rank, Scores
from motet_shared.wire.bus import Bus
from motet_shared.wire.failover import Failover, StreamMoves

from .parts import part_end

ROLE = "ranking"


@dataclass(slots=True, kw_only=True)
class Ranked(StreamMoves):
    """Totals of a ranking request; complete once the generator has ended."""

    documents: int = 0
    tokens: int = 0


async def rank(
    bus: Bus,
    request: Rank,
    outcome: Ranked | None = None,
    *,
    deadline: float | None = None,
    patience: float = 5.0,
) -> AsyncGenerator[Scores, None]:
    """Yield the scores of the request's documents in order, several at a time.

    `deadline`: seconds for everything. `patience`: seconds without progress, in which an instance
    may appear or restart, before the last retryable error is raised. Other errors are raised at
    once.
    """
    outcome = outcome or Ranked()
    moves = Failover(
        bus,
        ROLE,
        request.model,
        outcome,
        lambda: outcome.documents,
        patience=patience,
        deadline=deadline,
        what="ranking",
    )
    while outcome.documents < len(request.documents):
        async with moves as instance:
            first = outcome.documents
            part = _part(request, first)
            async with bus.open(ROLE, part, instance=instance, deadline=moves.left()) as stream:
                async for item in stream:
                    if isinstance(item, Scores):
                        outcome.documents += len(item.values)
                        outcome.tokens += item.tokens
                        yield item
            if outcome.documents < first + len(part.documents):
                raise StreamBroken(f"{instance} ended before all documents were scored")


def _part(request: Rank, first: int) -> Rank:
    """Return the request for the documents from `first` on that fit into one message."""
    several = len(request.queries) > 1
    asked = [len(query) for query in request.queries]
    asked = asked if several else asked * len(request.documents)
    # Each query counts, though a common one is sent once: what is computed is bounded, too.
    lengths = [q + len(text) for q, text in zip(asked, request.documents, strict=True)]
    end = part_end(lengths, first)
    return msgspec.structs.replace(
        request,
        queries=request.queries[first:end] if several else request.queries,
        documents=request.documents[first:end],
        first=request.first + first,
    )
