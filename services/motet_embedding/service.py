"""Serve role `embedding`: operation `embed`."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import Any

import numpy as np

from motet_kernels.runtime import native
from motet_shared.errors import BadRequest
from motet_shared.messages import Embed, ModelCard, Usage, Vectors
from motet_shared.process.actor import Actor, operation
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call

from .config import EmbeddingConfig
from .encoder import Encoder
from .engine import Engine
from .texts import Text, Texts
from .thread import EmbeddingSessions

log = logging.getLogger(__name__)

_MAX_ITEM_BYTES = (
    256 * 1024
)  # most bytes of vectors in one item: a message stays far below `max_payload`


class Embedding(Actor):
    """Serve one embedding model: texts in, vectors out."""

    role = "embedding"
    config: EmbeddingConfig

    def __init__(self, config: EmbeddingConfig, bus: Bus):
        super().__init__(config, bus)
        self.max_active = config.max_requests
        self._texts: Texts | None = None
        self._sessions: EmbeddingSessions | None = None
        self._card: ModelCard | None = None

    async def warm(self) -> None:
        config = self.config.engine()
        encoder = await asyncio.to_thread(Encoder.load, config)
        folder = encoder.folder
        self._texts = Texts(folder, encoder.limit, encoder.vocabulary)
        self._sessions = EmbeddingSessions(Engine(config, encoder), self.crash)
        self.bus.monitor.duties.append(self._sessions.thread.watch(self.config.step_timeout))
        created = int((folder.transformer / "config.json").stat().st_mtime)
        self._card = ModelCard(
            name=config.model_name,
            context=encoder.limit,
            created=created,
            vocab_size=encoder.vocabulary,
        )
        log.info(
            "model loaded",
            extra={"model": self._card.name, "size": encoder.size, "packed": encoder.packed},
        )

    async def close(self) -> None:
        if self._sessions is not None:
            await self._sessions.close()

    @property
    def sessions(self) -> EmbeddingSessions:
        """Return the sessions. Raises RuntimeError before `warm` has loaded the model."""
        if self._sessions is None:
            raise RuntimeError("the model is not loaded yet")
        return self._sessions

    @operation(Embed)
    async def embed(self, call: Call, request: Embed) -> None:
        """Send `Vectors` of all texts, in order, as they are computed."""
        self.check_served(request.model)
        size = self._size(request.dimensions)
        texts = await self._read(request)
        done = 0
        async with (
            self.sessions.submitting(texts, request.priority) as pending,
            aclosing(pending.read(max(1, _MAX_ITEM_BYTES // (4 * size)))) as vectors,
        ):
            async for rows in vectors:
                tokens = sum(len(text) for text in texts[done : done + len(rows)])
                done += len(rows)
                await call.send(
                    Vectors(_truncate(rows, size).astype("<f4").tobytes(), len(rows), tokens)
                )
        call.finish("stop", Usage(prompt_tokens=sum(map(len, texts))))

    def _size(self, dimensions: int) -> int:
        """Return the requested vector size; 0 requests all. Raises BadRequest if out of bounds."""
        whole = self.sessions.thread.engine.encoder.size
        if not 0 <= dimensions <= whole:
            message = (
                f"dimensions: {dimensions}; this model's vectors have {whole}, give 1 to {whole}"
            )
            raise BadRequest(message, param="dimensions")
        return dimensions or whole

    async def _read(self, request: Embed) -> list[Text]:
        if self._texts is None:
            raise RuntimeError("the model is not loaded yet")
        if not 1 <= len(request.input) <= (max_texts := self.config.max_waiting):
            raise BadRequest(
                f"input: has {len(request.input)} texts; give 1 to {max_texts}", param="input"
            )
        return await asyncio.to_thread(
            self._texts.read, request.input, request.prompt, request.first
        )

    # --------------------------------------------------------------------------------------- health
    def load(self) -> dict[str, float]:
        if self._sessions is None:
            return {}
        stats = self._sessions.thread.stats()
        return {
            "queued": stats["waiting"] + stats["commands"],
            "tokens": stats["tokens"],
            **native.fallback(),
        }

    def models(self) -> list[ModelCard]:
        return [self._card] if self._card else []

    def stats(self) -> dict[str, Any]:
        """Return numbers, which are metrics too, and strings: what was chosen at load time."""
        if self._sessions is None:
            return {}
        return self._sessions.thread.stats() | self._sessions.thread.engine.encoder.describe()

    def check_integrity(self) -> None:
        """Raise RuntimeError if an idle actor still holds engine work."""
        super().check_integrity()
        if not self.bus.calls.active and self.sessions.thread.engine.has_work:
            raise RuntimeError("no call is active, but the engine has work")


def _truncate(
    vectors_BV: np.ndarray[Any, np.dtype[np.float32]], size: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the first `size` numbers of each vector at unit length; whole vectors unchanged."""
    if size == vectors_BV.shape[1]:
        return vectors_BV
    cut = vectors_BV[:, :size]
    values: np.ndarray[Any, np.dtype[np.float32]] = cut / np.maximum(
        np.linalg.norm(cut, axis=1, keepdims=True), np.finfo(np.float32).tiny
    )
    return values
