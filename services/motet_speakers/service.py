"""Serve role `speakers`: voice embeddings of stretches of a file (`voices`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from motet_media.pool import SIZE, decoding
from motet_media.sound_file import RATE, Samples, read_blocks
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import UnknownModel
from motet_shared.messages import BlobRef, EmbedSpeakers, ModelCard, SpeakerEmbedding
from motet_shared.process.actor import Actor, operation
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call

from .config import SpeakersConfig
from .encoder import SpeakerEncoder
from .features import Floats, features
from .stretches import Span, check, stretches

BLOCK = 30 * RATE  # samples that are read at a time


class Speakers(Actor):
    """Serve one speaker encoder.

    Files take turns, batch by batch, on one thread.
    """

    role = "speakers"
    config: SpeakersConfig

    def __init__(self, config: SpeakersConfig, bus: Bus):
        super().__init__(config, bus)
        self.max_active = config.max_files
        self._store = BlobStore.of(config, bus)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="speakers")
        # Files hold a child between their batches: the thread must not wait for one of another's.
        self._files = asyncio.Semaphore(SIZE)
        self._encoder: SpeakerEncoder | None = None
        self._card: ModelCard | None = None
        self._counts = {"spans": 0, "batches": 0}

    async def warm(self) -> None:
        folder = Path(self.config.model)
        self._encoder = await asyncio.to_thread(SpeakerEncoder.load, self.config.model)
        await self._store.start()
        await self._run(self._encoder.encode, [features(np.zeros(RATE, np.float32))])
        name, created = (
            self.config.name or self._encoder.name,
            int((folder / "config.json").stat().st_mtime),
        )
        self._card = ModelCard(name=name, context=0, created=created)

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        await self._store.close()

    async def _run(self, function: Any, *args: Any) -> Any:
        return await decoding(function, *args, executor=self._thread)

    @operation(EmbedSpeakers)
    async def embed_speakers(self, call: Call, request: EmbedSpeakers) -> None:
        """Send a `SpeakerEmbedding` per span of a file, in order."""
        if (
            self._card is None
            or self._encoder is None
            or request.model not in ("", self._card.name)
        ):
            served = self._card.name if self._card else "nothing yet"
            raise UnknownModel(
                f"model: {request.model!r} is not served, {served} is", param="model"
            )
        check(request.spans)
        spans = request.spans or [(0.0, self.config.max_span)]
        async with self._files:
            await self._embed(call, request.audio, spans, self._encoder)
        call.finish("stop")

    async def _embed(
        self, call: Call, audio: BlobRef, spans: Sequence[Span], encoder: SpeakerEncoder
    ) -> None:
        data = await self._store.get(audio)
        blocks = read_blocks(data, self.config.max_audio, BLOCK)
        parts = stretches(blocks, spans, self.config.max_span)
        try:
            async for vectors in self._encoded(encoder, parts):
                for vector in vectors:
                    await call.send(
                        SpeakerEmbedding(vector.astype("<f4").tobytes(), encoder.shape.alike)
                    )
        finally:
            # the generator still runs on the thread; its child process is killed already
            with suppress(ValueError):
                blocks.close()

    async def _encoded(
        self, encoder: SpeakerEncoder, parts: Iterator[Samples]
    ) -> AsyncIterator[Floats]:
        """Yield vectors batch by batch: (stretches of the batch, size)."""

        def batch() -> Floats | None:
            frames = [features(part) for part in islice(parts, self.config.max_batch)]
            return encoder.encode(frames) if frames else None

        while (vectors := await self._run(batch)) is not None:
            self._counts["batches"] += 1
            self._counts["spans"] += len(vectors)
            yield vectors

    def models(self) -> list[ModelCard]:
        return [self._card] if self._card else []

    def stats(self) -> dict[str, Any]:
        return self._counts | self._store.stats()
