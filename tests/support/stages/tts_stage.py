"""Run speech synthesis services over a tiny checkpoint, for tests of service, pipeline and gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from motet_llm.config import DecodeConfig
from motet_llm.service import Decode
from motet_pipelines.voice.speak import Outcome, speak
from motet_shared.messages import Audio, Speak
from motet_shared.testing import MemoryHub, memory_bus, running, settle
from motet_shared.wire.bus import Bus
from motet_tts.config import TtsConfig
from motet_tts.service import Tts

MODEL = "tiny-tts"
TEXT = "The blue circle, as you know, is left of 21 stars. It is small. Dr. Li paid $5.20! The end."


@dataclass
class Speech:
    """Hold the items that a caller has received."""

    items: list[Audio] = field(default_factory=list)
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def pcm(self) -> bytes:
        return b"".join(item.data for item in self.items)

    @property
    def words(self) -> list[tuple[str, int, int]]:
        """Return the last word list of each sentence."""
        last = {item.sentence: item.words for item in self.items if item.words}
        return [word for sentence in sorted(last) for word in last[sentence]]


def ask(text: str = TEXT, **fields: Any) -> Speak:
    return Speak(model=MODEL, text=text, **{"seed": 7, **fields})


def config(folder: Path, **settings: Any) -> TtsConfig:
    small: dict[str, Any] = {"first_chunk": 0.002, "chunk": 0.01, "metrics_port": -1}
    return TtsConfig(model=str(folder), name=MODEL, **{**small, **settings})


async def said(bus: Bus, request: Speak, **options: Any) -> Speech:
    """Return all items of the pipeline."""
    speech = Speech()
    async with aclosing(speak(bus, request, speech.outcome, **options)) as batches:
        async for batch in batches:
            speech.items += batch
    return speech


@asynccontextmanager
async def stage(
    folder: Path, count: int = 1, **settings: Any
) -> AsyncIterator[tuple[Bus, list[Tts], MemoryHub]]:
    """Run a caller and some synthesis services on a bus in memory."""
    hub = MemoryHub()
    async with AsyncExitStack() as stack:
        caller = await memory_bus(hub, "gateway")
        stack.push_async_callback(caller.close)
        actors = [await start(hub, stack, folder, **settings) for _ in range(count)]
        await settle()
        yield caller, actors, hub


async def start(hub: MemoryHub, stack: AsyncExitStack, folder: Path, **settings: Any) -> Tts:
    bus = await memory_bus(hub, "tts")
    stack.push_async_callback(bus.close)
    actor = Tts(config(folder, **settings), bus)
    await actor.start()
    stack.push_async_callback(actor.close)
    return actor


@asynccontextmanager
async def decoding(hub: MemoryHub, folder: Path, **settings: Any) -> AsyncIterator[Decode]:
    """Run a decode instance that serves the language model of a speech checkpoint."""
    small: dict[str, Any] = {"num_blocks": 100, "dtype": "float32", "context": 192}
    config = DecodeConfig(model=str(folder), threads=1, metrics_port=-1, **{**small, **settings})
    async with running(Decode(config, await memory_bus(hub, "decode"))) as actor:
        await settle()
        yield actor
