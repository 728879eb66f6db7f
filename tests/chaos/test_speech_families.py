"""Cancel, death and move of every family of speech models, in processes of its own on a real NATS server.

Where decode generates the tokens of a family, its instances are struck too. A covering selection is
in `make test-long`, all others in `make extended PART=storm`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from motet_pipelines.voice.speak import Outcome, speak
from motet_shared.messages import Audio, Heartbeat, Speak
from motet_shared.testing import NatsServer
from motet_shared.wire.bus import Bus
from motet_shared.wire.discovery import Directory
from motet_tts.checkpoint import FAMILIES
from support.checkpoints import tts_checkpoints
from support.running import strikes
from support.running.fork_server import ForkServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]
START_SECONDS = 120.0
TWO = 2
OWN = "motet_pocket_tts"
POCKET = Path(__file__).resolve().parents[2] / "models" / "pocket-tts"
TTS = ("motet_tts", "--threads", "1", "--first-chunk", "0.002", "--chunk", "0.01")
DECODE = ("motet_llm", "--threads", "1", "--num-blocks", "100", "--context", "512")
# A family whose frames are codes, one whose tokens decode generates, and one without frames.
COVERING = ("csm", "llama", "vits")
# Sentences of a text: enough that an instance is still busy when the first item has come.
SENTENCES = {OWN: 12, "vits": 80}
SHORT: dict[str, dict[str, int]] = {"csm": {"positions": 192}}  # sentences end with its positions


@dataclass
class World:
    """A caller and the processes of one family at a time."""

    nats: NatsServer
    forks: ForkServer
    bus: Bus

    @property
    def directory(self) -> Directory:
        return self.bus.directory

    async def begin(self, role: str, folder: Path, count: int) -> None:
        """Start processes of a role, and wait until two are ready."""
        module, *flags = TTS if role == "tts" else DECODE
        for _ in range(count):
            await self.forks.start(self.nats, module, "--model", str(folder), *flags)
        ready = functools.partial(_two_ready, role, folder.name)
        await self.directory.wait_for(ready, START_SECONDS)

    async def serving(self, role: str, voice: str | None) -> Heartbeat:
        """Return the instance that serves a speech: `voice`, or the decode instance behind it."""
        if role == "tts":
            return next(b for b in self.directory.instances(role) if b.instance == voice)
        async with asyncio.timeout(20):
            while True:
                for beat in self.directory.ready(role):
                    if beat.load.get("active"):
                        return beat
                await asyncio.sleep(0.01)


def _two_ready(role: str, model: str, directory: Directory) -> bool:
    return len(directory.ready(role, model=model)) == TWO


Strike = Callable[[World, Heartbeat], Awaitable[None]]


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    async with NatsServer() as nats, ForkServer("motet_tts.service", "motet_llm.service") as forks:
        bus = await nats.bus("gateway")
        try:
            yield World(nats, forks, bus)
        finally:
            await bus.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes() -> AsyncIterator[World]:
    async with world() as made:
        yield made


def cases() -> list[Any]:
    """Return every family; those that are not in the selection are in an extended part."""
    return [
        pytest.param(
            family,
            marks=pytest.mark.long if family in COVERING else pytest.mark.extended("storm"),
        )
        for family in sorted(FAMILIES)
    ]


@pytest.mark.parametrize("family", cases())
async def test_every_voice_survives_leaving_moving_and_death(
    processes: World, family: str, tmp_path: Path
) -> None:
    """What is left is freed; what loses an instance goes on at another one, with equal samples."""
    folder = POCKET if family == OWN else made(family, tmp_path)
    roles = ("tts", "decode") if family == "llama" else ("tts",)
    for role in roles:
        await processes.begin(role, folder, TWO)
    whole, instances = await spoken(processes, family, folder.name)
    assert whole
    assert len(instances) == 1
    await leave(processes, family, folder.name)
    await strikes.idle(processes.directory)
    for role in roles:
        for strike in (send_away, kill):
            pcm, instances = await spoken(processes, family, folder.name, role, strike)
            assert pcm == whole
            assert len(instances) == (2 if role == "tts" else 1)
            await processes.begin(role, folder, 1)
    await strikes.idle(processes.directory)
    await processes.forks.end_all()


def made(family: str, root: Path) -> Path:
    return tts_checkpoints.MAKERS[family](root / family, **SHORT.get(family, {}))


def asked(family: str, model: str) -> Speak:
    return Speak(model=model, text="Red. Blue. " * (SENTENCES.get(family, 2) // 2), seed=7)


async def spoken(
    world: World, family: str, model: str, role: str = "", strike: Strike | None = None
) -> tuple[bytes, set[str | None]]:
    """Return all samples, and the instances that spoke; after the first ones one is struck."""
    outcome, items, instances = Outcome(), list[Audio](), set[str | None]()
    request = asked(family, model)
    async with (
        asyncio.timeout(120),
        aclosing(speak(world.bus, request, outcome, patience=60.0)) as batches,
    ):
        async for batch in batches:
            if not items and strike is not None:
                await strike(world, await world.serving(role, outcome.instance))
            instances.add(outcome.instance)
            items += batch
    return b"".join(item.data for item in items), instances


async def leave(world: World, family: str, model: str) -> None:
    """Leave after the first item."""
    async with aclosing(speak(world.bus, asked(family, model))) as batches:
        async for _ in batches:
            return
    raise AssertionError("nothing came")


async def send_away(world: World, struck: Heartbeat) -> None:
    await strikes.send_away(world.directory, struck, 60)


async def kill(world: World, struck: Heartbeat) -> None:
    strikes.kill(struck)
