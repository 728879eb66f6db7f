"""Serve role `ranking`: operation `rank`."""

from __future__ import annotations

import asyncio

from motet_shared.errors import BadRequest
from motet_shared.messages import Rank, Scores, Usage
from motet_shared.process.actor import operation
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call

from .actor import TextActor
from .config import EmbeddingConfig
from .folder import Folder
from .rankers import Ranker, Ranking, load_ranker


class RankingService(TextActor):
    """Serve one ranking model: queries and documents in, scores out."""

    role = "ranking"

    def __init__(self, config: EmbeddingConfig, bus: Bus):
        super().__init__(config, bus)
        self._ranker: Ranker | None = None

    async def warm(self) -> None:
        config = self.config.engine()
        ranker = self._ranker = await asyncio.to_thread(load_ranker, config)
        card = {"context": ranker.limit, "vocab_size": ranker.vocabulary}
        self.serve(config, ranker.model, Folder.read(config.model), **card)

    @operation(Rank)
    async def rank(self, call: Call, request: Rank) -> None:
        """Send `Scores` of all documents, in order."""
        self.check_served(request.model)
        ranking = await self._read(request)
        async with self.sessions.submitting(ranking.texts, request.priority) as pending:
            vectors = await pending.all()
        scores = await asyncio.to_thread(ranking.score, vectors)
        await call.send(Scores(scores, ranking.tokens))
        call.finish("stop", Usage(prompt_tokens=ranking.tokens))

    async def _read(self, request: Rank) -> Ranking:
        if self._ranker is None:
            raise RuntimeError("the model is not loaded yet")
        queries, documents = request.queries, request.documents
        most = self.config.max_waiting // 2  # queries may need vectors of their own
        if not 1 <= len(documents) <= most:
            raise BadRequest(
                f"documents: has {len(documents)} texts; give 1 to {most}", param="documents"
            )
        if len(queries) not in (1, len(documents)):
            raise BadRequest(
                f"queries: {len(queries)} for {len(documents)} documents; give one, or one for each",
                param="queries",
            )
        if request.max_document < 0:
            raise BadRequest(
                f"max_document: {request.max_document} is negative; give 0 for no limit",
                param="max_document",
            )
        return await asyncio.to_thread(
            self._ranker.read, queries, documents, request.first, request.max_document
        )
