"""Fake image generation and embedding services with scripted results."""

from __future__ import annotations

import asyncio
import struct

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
    """Return embeddings, which count texts and then pictures, and five tokens for each."""

    role = "embedding"
    size = 0  # numbers of a vector, with two vectors of each text; 0: one vector of two numbers

    def models(self) -> list[ModelCard]:
        return [ModelCard(name=VECTORS, context=0)]

    @operation(Embed)
    async def embed(self, call: Call, request: Embed) -> None:
        count = len(request.input) + len(request.pictures)
        for index in range(count if self.size else 0):
            rows = struct.pack(f"<{2 * self.size}f", *[float(index)] * 2 * self.size)
            await call.send(Vectors(rows[: len(rows) // 2], 0, 0, self.size))  # in two pieces
            await call.send(Vectors(rows[len(rows) // 2 :], 1, 5, self.size))
        if not self.size:
            rows = struct.pack(f"<{2 * count}f", *(float(n // 2) for n in range(2 * count)))
            await call.send(Vectors(rows, count, 5 * count))
        call.finish("stop")
