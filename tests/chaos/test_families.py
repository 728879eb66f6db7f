"""Cancel, death and move of every family of every sense, in processes of its own.

`SENSES` has a row for each sense, and a sense a checkpoint for each family. A few of each sense
(`covering`) are in `make test-long`; all others are in `make extended PART=storm`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from motet_pipelines.voice.transcribe import NO_AUDIO, TranscriptionOutcome, transcribe
from motet_shared.blobs.store import BlobStore
from motet_shared.messages import Heartbeat, Transcribe
from motet_shared.testing import NatsServer
from motet_shared.wire.bus import Bus
from motet_shared.wire.discovery import Directory
from motet_shared.wire.failover import StreamMoves
from support.checkpoints.asr_checkpoints import noise, wav
from support.checkpoints.recognizers import TINY
from support.running import strikes
from support.running.fork_server import ForkServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]
START_SECONDS = 120.0
TWO = 2


@dataclass(frozen=True)
class Client:
    """What asks a sense for something: its connection, and where it keeps files."""

    bus: Bus
    store: BlobStore


@dataclass(frozen=True)
class Sense:
    """Describe a role, its families, and what is asked of them.

    argv: of a process, without its checkpoint and name.
    families: what writes a tiny checkpoint of each.
    covering: families of `make test-long`, of different engines.
    ask: begins what takes several items, and yields each in a form that can be compared; it
        reports instances and moves in the outcome that it is given.
    outcome: makes that outcome.
    """

    role: str
    argv: tuple[str, ...]
    families: Mapping[str, Callable[[Path], Path]]
    covering: tuple[str, ...]
    ask: Callable[[Client, str, Any], AsyncGenerator[object, None]]
    outcome: Callable[[], StreamMoves]


async def hear(client: Client, model: str, outcome: Any) -> AsyncGenerator[object, None]:
    """Yield the segments of a recording of many windows."""
    request = Transcribe(model=model, audio=NO_AUDIO, language="de")
    segments = transcribe(
        client.bus, client.store, wav(noise(30.0, 5)), request, outcome, patience=60.0
    )
    async with aclosing(segments):
        async for segment in segments:
            yield segment.id, segment.window, segment.start, segment.text


HEARS = Sense(
    role="asr",
    argv=(
        *("motet_asr", "--threads", "1", "--no-fallback", "--window", "2", "--parallel", "1"),
        *("--max-files", "4"),
    ),
    families=TINY,
    covering=("hubert", "voxtral_realtime"),
    ask=hear,
    outcome=TranscriptionOutcome,
)
SENSES = (HEARS,)


@dataclass
class World:
    """A caller and the processes of any family, all on one NATS server."""

    nats: NatsServer
    forks: ForkServer
    client: Client

    @property
    def directory(self) -> Directory:
        return self.client.bus.directory

    async def begin(self, sense: Sense, family: str, folder: Path, count: int) -> None:
        """Start processes, and wait until two of the family are ready."""
        module, *flags = sense.argv
        argv = (module, "--model", str(folder), "--name", family, *flags)
        for _ in range(count):
            await self.forks.start(self.nats, *argv)
        ready = functools.partial(_two_ready, sense.role, family)
        await self.directory.wait_for(ready, START_SECONDS)

    def beat(self, sense: Sense, instance: str | None) -> Heartbeat:
        return next(
            beat for beat in self.directory.instances(sense.role) if beat.instance == instance
        )


def _two_ready(role: str, family: str, directory: Directory) -> bool:
    return len(directory.ready(role, model=family)) == TWO


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    modules = [f"{sense.argv[0]}.service" for sense in SENSES]
    async with NatsServer() as nats, ForkServer(*modules) as forks:
        bus = await nats.bus("gateway")
        # One item at a time: what is struck after an item has more to do, however fast it is.
        bus.open = functools.partial(bus.open, window=1)  # type: ignore[method-assign]
        try:
            async with BlobStore(bus.instance, 64 << 20) as store:
                yield World(nats, forks, Client(bus, store))
        finally:
            await bus.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes() -> AsyncIterator[World]:
    async with world() as made:
        yield made


def cases() -> list[Any]:
    """Return every family; those that cover no engine are in an extended part."""
    return [
        pytest.param(
            sense,
            family,
            marks=pytest.mark.long if family in sense.covering else pytest.mark.extended("storm"),
            id=f"{sense.role}-{family}",
        )
        for sense in SENSES
        for family in sorted(sense.families)
    ]


@pytest.mark.parametrize(("sense", "family"), cases())
async def test_every_family_survives_leaving_moving_and_death(
    processes: World, sense: Sense, family: str, tmp_path: Path
) -> None:
    """What is left is freed; what loses its instance goes on at the other one, with equal items."""
    folder = sense.families[family](tmp_path / family)
    await processes.begin(sense, family, folder, TWO)
    whole, instances = await collect(processes, sense, family)
    assert len(instances) == 1
    assert len(whole) > 3
    instance = await leave(processes, sense, family)
    await strikes.idle(processes.directory, [instance])
    for strike in (send_away, kill):
        items, instances = await collect(processes, sense, family, strike)
        assert items == whole
        assert len(instances) == TWO
        await processes.begin(sense, family, folder, 1)
    await processes.forks.end_all()


Strike = Callable[[World, Sense, str], Any]


async def collect(
    world: World, sense: Sense, family: str, strike: Strike | None = None
) -> tuple[list[object], set[str | None]]:
    """Return all items and the instances that made them; after the first item one is struck."""
    outcome, items, instances = sense.outcome(), list[object](), set[str | None]()
    async with asyncio.timeout(120), aclosing(sense.ask(world.client, family, outcome)) as stream:
        async for item in stream:
            items.append(item)
            instances.add(outcome.instance)
            if len(items) == 1 and strike is not None:
                await strike(world, sense, str(outcome.instance))
    return items, instances


async def leave(world: World, sense: Sense, family: str) -> str:
    """Leave after the first item; return the instance."""
    outcome = sense.outcome()
    async with aclosing(sense.ask(world.client, family, outcome)) as stream:
        async for _ in stream:
            return str(outcome.instance)
    raise AssertionError("nothing came")


async def send_away(world: World, sense: Sense, instance: str) -> None:
    await strikes.send_away(world.directory, world.beat(sense, instance))


async def kill(world: World, sense: Sense, instance: str) -> None:
    strikes.kill(world.beat(sense, instance))
