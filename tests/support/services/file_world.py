"""Run a caller with sound files and voice activity services on a bus in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from motet_shared.blobs.store import BlobStore
from motet_shared.testing import MemoryHub, memory_bus, running, settle
from motet_shared.wire.bus import Bus
from motet_vad.config import VadConfig
from motet_vad.service import Vad


@dataclass
class FileWorld:
    """Hold the caller and its services.

    stack: services that end before the caller's files are counted.
    """

    hub: MemoryHub
    bus: Bus
    store: BlobStore
    stack: AsyncExitStack

    async def start_vad(self, **options: Any) -> Vad:
        vad = Vad(VadConfig(metrics_port=-1, **options), await memory_bus(self.hub, "vad"))
        await self.stack.enter_async_context(running(vad))
        await settle()
        return vad


World = TypeVar("World", bound=FileWorld)


@asynccontextmanager
async def file_world(kind: type[World], memory: int) -> AsyncIterator[World]:
    """Run the fixture and require that no file is left at its end.

    memory: bytes for the files.
    """
    async with AsyncExitStack() as stack:
        hub = MemoryHub()
        bus = await memory_bus(hub, "gateway")
        stack.push_async_callback(bus.close)
        store = await stack.enter_async_context(BlobStore(bus.instance, memory))
        yield kind(hub, bus, store, stack)
        store.check_integrity()
        assert store.stats()["blobs"] == 0
