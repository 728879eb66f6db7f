"""A fake ranking service: words in common instead of a model."""

from __future__ import annotations

from motet_shared.errors import MotetError
from motet_shared.messages import ModelCard, Rank, Scores
from motet_shared.process.actor import Actor, operation
from motet_shared.wire.call import Call

RANKER = "ranker"


class WordRanker(Actor):
    """Score a document by how many words of the query it has; each word is a token."""

    role = "ranking"
    error: MotetError | None = None
    asked: Rank | None = None

    def models(self) -> list[ModelCard]:
        return [ModelCard(name=RANKER, context=64)]

    @operation(Rank)
    async def rank(self, call: Call, request: Rank) -> None:
        self.asked = request
        if self.error is not None:
            raise self.error
        queries = request.queries
        queries = queries if len(queries) > 1 else queries * len(request.documents)
        scores, tokens = [], 0
        for query, document in zip(queries, request.documents, strict=True):
            words = document.split()[: request.max_document or None]
            scores.append(float(sum(word in words for word in query.split())))
            tokens += len(query.split()) + len(words)
        await call.send(Scores(scores, tokens))
        call.finish("stop")
