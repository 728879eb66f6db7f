"""Run diffusion services over a tiny checkpoint in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from motet_diffusion.config import DiffusionConfig
from motet_diffusion.service import Diffusion
from motet_pipelines.images.draw import Drawn, draw
from motet_shared.blobs.store import BlobStore
from motet_shared.messages import DenoisingProgress, Draw
from motet_shared.testing import MemoryHub, memory_bus, settle
from motet_shared.wire.bus import Bus

MODEL = "tiny-draw"
# What a process that serves a tiny Stable Diffusion imports, for a `ForkServer`.
LOADED = (
    "motet_diffusion.service",
    "motet_diffusion.pipeline.pipeline_factory",
    "diffusers.pipelines.auto_pipeline",
)


@dataclass
class ReceivedItems:
    """Hold the items that a caller has received."""

    strokes: list[DenoisingProgress] = field(default_factory=list)
    outcome: Drawn = field(default_factory=Drawn)

    @property
    def pixels(self) -> NDArray[np.int64]:
        return pixels(self.outcome.data)

    @property
    def previews(self) -> list[bytes]:
        return [stroke.preview for stroke in self.strokes if stroke.preview]


def pixels(data: bytes) -> NDArray[np.int64]:
    return np.asarray(Image.open(BytesIO(data))).astype(np.int64)


def ask(prompt: str = "two red circles", **fields: Any) -> Draw:
    return Draw(model=MODEL, prompt=prompt, **{"seed": 7, "steps": 6, **fields})


def config(folder: Path, **settings: Any) -> DiffusionConfig:
    small: dict[str, Any] = {
        "metrics_port": -1,
        "picture_memory": 1 << 20,
        "max_pixels": 1 << 14,
        "max_steps": 2000,
    }
    return DiffusionConfig(model=str(folder), name=MODEL, **{**small, **settings})


def flags(folder: Path) -> tuple[str, ...]:
    """Return the command line of a process."""
    return ("--model", str(folder), "--name", MODEL, "--threads", "1", "--max-steps", "2000")


@dataclass
class Caller:
    """Send requests: a bus, and the store of its files."""

    bus: Bus
    store: BlobStore

    async def draw(self, request: Draw, **options: Any) -> ReceivedItems:
        """Return all items of the pipeline."""
        seen = ReceivedItems()
        async with aclosing(
            draw(self.bus, self.store, request, seen.outcome, **options)
        ) as strokes:
            async for stroke in strokes:
                seen.strokes.append(stroke)
        return seen


@asynccontextmanager
async def stage(
    folder: Path, count: int = 1, **settings: Any
) -> AsyncIterator[tuple[Caller, list[Diffusion], MemoryHub]]:
    """Run a caller and some diffusion services on a bus in memory."""
    hub = MemoryHub()
    async with AsyncExitStack() as stack:
        bus = await memory_bus(hub, "gateway")
        stack.push_async_callback(bus.close)
        store = await stack.enter_async_context(BlobStore(bus.instance, 1 << 20))
        actors = [await start(hub, stack, folder, **settings) for _ in range(count)]
        await settle()
        yield Caller(bus, store), actors, hub


async def start(hub: MemoryHub, stack: AsyncExitStack, folder: Path, **settings: Any) -> Diffusion:
    bus = await memory_bus(hub, "diffusion")
    stack.push_async_callback(bus.close)
    actor = Diffusion(config(folder, **settings), bus)
    await actor.start()
    stack.push_async_callback(actor.close)
    return actor
