"""Fake image generation and embedding services with scripted results."""

from __future__ import annotations

import asyncio

from motet_shared.blobs.store import BlobStore
from motet_shared.errors import MotetError
from motet_shared.messages import DenoisingProgress, Draw, Embed, ModelCard, Picture, Vectors
from motet_shared.process.actor import Actor, operation
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call

BRUSH, VECTORS = "scripted-brush", "scripted-vectors"


class FakeDiffusion(Actor):
    """Send two estimates and a picture; fail or pause after the first estimate if set."""

    role = "diffusion"

    def __init__(self, bus: Bus):
        super().__init__(None, bus)
        self.store = BlobStore(bus.instance, 1 << 20)
        self.error: MotetError | None = None
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def warm(self) -> None:
        await self.store.start()

    async def close(self) -> None:
        await self.store.close()

    def models(self) -> list[ModelCard]:
        return [ModelCard(name=BRUSH, context=0)]

    @operation(Draw)
    async def draw(self, call: Call, request: Draw) -> None:
        await call.send(DenoisingProgress(1, 2))
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        await call.send(DenoisingProgress(2, 2))
        await call.send(
            Picture(await self.store.put_async(b"a picture", readers=(call.caller,)), 8, 8, 2)
        )
        call.finish("stop")


class Embedder(Actor):
    """Return embeddings and count five tokens per text."""

    role = "embedding"

    def models(self) -> list[ModelCard]:
        return [ModelCard(name=VECTORS, context=0)]

    @operation(Embed)
    async def embed(self, call: Call, request: Embed) -> None:
        await call.send(
            Vectors(bytes(8 * len(request.input)), len(request.input), 5 * len(request.input))
        )
        call.finish("stop")
