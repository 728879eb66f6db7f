"""Processes of services on a nats-server, each with a way to it of its own; what dies is started again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import nats.errors
import psutil
from nats.aio.client import Client
from nats.aio.msg import Msg

from motet_shared.messages import Heartbeat
from motet_shared.testing import NatsServer
from motet_shared.wire import subjects
from motet_shared.wire.bus import Bus
from motet_shared.wire.discovery import Directory
from support.running.fork_server import ForkServer, alive
from support.stages import diffusion_stage

NATS = "nats"
_READY = 240.0  # seconds
_LIGHT_ROLES = ("gateway", "tokenizer", "fdstore")
_LIGHT = (
    "motet_gateway.service",
    "motet_tokenizer.service",
    "motet_fdstore.store",
    "transformers.models.llama",
)
_SLOW = (0.02, 0.08)  # seconds in which a slowed process runs, and in which it is stopped
_ROOM = 8 << 20  # bytes that a process without memory may still map
LIMITS = ("memory", "disk")
_LOADED = (
    "motet_llm.service",
    "motet_llm.serving.prefill_service",
    "motet_encoder.service",
    "motet_vad.service",
    "motet_asr.service",
    "motet_tts.service",
    *diffusion_stage.LOADED,
    "transformers.models.whisper.modeling_whisper",
    "transformers.models.pocket_tts.modeling_pocket_tts",
    "transformers.models.llama.modeling_llama",
)


class Line:
    """Carry a process' connections to NATS, and cut them. It looks like the server to that process."""

    def __init__(self, server: NatsServer):
        self.credentials = server.credentials
        self._nats = server
        self._ends: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._delivers, self._passes = asyncio.Event(), asyncio.Event()
        self._delivers.set()
        self._passes.set()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def hold(self) -> None:
        """Keep back what the server sends, until `cut`, with which it is lost."""
        self._delivers.clear()

    def cut(self) -> None:
        """Break off every connection; new ones may be made at once."""
        for end in list(self._ends):
            end.transport.abort()
        self._delivers.set()

    @contextmanager
    def severed(self) -> Iterator[None]:
        """Let nothing through in the block, either way; no connection is told, and new ones are not answered."""
        self._passes.clear()
        try:
            yield
        finally:
            self._passes.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry a connection in a task of the line's own: asyncio's would log that it was cancelled."""
        task = asyncio.create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._passes.wait()
            await self._connect(reader, writer)
        except OSError:
            pass  # NATS is not there: the process tries again
        finally:
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._nats.port)
        self._ends |= {writer, back}
        ways = [
            asyncio.create_task(_pump(reader, back, self._passes)),
            asyncio.create_task(_pump(there, writer, self._passes, self._delivers)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for end in (writer, back):
                end.transport.abort()
                self._ends.discard(end)


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *gates: asyncio.Event
) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            for gate in gates:
                await gate.wait()
            writer.write(data)
            await writer.drain()


@dataclass
class Member:
    """Describe a process.

    is_service: whether it is on NATS. died: how often it ended, ready, and was not struck by a test.
    """

    name: str
    role: str
    argv: tuple[str, ...]
    line: Line
    forks: ForkServer
    is_service: bool = True
    pid: int = 0
    died: int = 0
    starts: int = 0


@dataclass
class Processes:
    """Run and strike processes. `bus` looks, as an operator does; `client` asks for statistics."""

    nats: NatsServer
    bus: Bus
    client: Client
    light: ForkServer
    heavy: ForkServer
    exits: AsyncExitStack
    members: list[Member] = field(default_factory=list)
    _struck: set[int] = field(default_factory=set)

    async def add(
        self, name: str, role: str, argv: Sequence[str], *, is_service: bool = True
    ) -> None:
        """Start a process: a module and its flags. `all_ready` waits for it."""
        line = Line(self.nats)
        await line.open()
        self.exits.push_async_callback(line.close)
        forks = self.light if role in _LIGHT_ROLES else self.heavy
        member = Member(name, role, tuple(argv), line, forks, is_service)
        await self.start(member)
        self.members.append(member)

    async def start(self, member: Member) -> None:
        member.pid = await member.forks.start(member.line, *member.argv)
        member.starts += 1

    async def supervise(self) -> None:
        """Start again what has ended, until cancelled.

        What starts while NATS is away may have to be started twice.
        """
        were_ready: set[int] = set()
        while True:
            were_ready |= self._ready_pids(self.bus.directory)
            for member in [*self.members]:
                if not alive(member.pid):
                    member.died += member.pid in were_ready - self._struck
                    await self.start(member)
            await asyncio.sleep(0.05)

    async def all_ready(self, seconds: float = _READY) -> None:
        """Wait until every process takes work. TimeoutError names those that do not."""

        def ready(directory: Directory) -> bool:
            return not self.unready(directory)

        try:
            await self.bus.directory.wait_for(ready, seconds)
        except TimeoutError:
            missing = ", ".join(self.unready(self.bus.directory))
            raise TimeoutError(f"not ready within {seconds:g} s: {missing}") from None

    def unready(self, directory: Directory) -> list[str]:
        ready = self._ready_pids(directory)
        return [one.name for one in self.members if one.is_service and one.pid not in ready]

    @staticmethod
    def _ready_pids(directory: Directory) -> set[int]:
        return {beat.pid for beat in directory.everyone() if beat.state == "ready"}

    def instances(self) -> dict[str, str]:
        """Return the instance id by the name of each process that has beaten."""
        beats = {beat.pid: beat.instance for beat in self.bus.directory.everyone()}
        return {member.name: beats[member.pid] for member in self.members if member.pid in beats}

    @asynccontextmanager
    async def opening(self, role: str) -> AsyncIterator[asyncio.Future[Member]]:
        """Yield a future of the process to which the role's next call is opened.

        It is known when the process itself is told, however short the call is.
        """
        opened: asyncio.Future[Member] = asyncio.get_running_loop().create_future()

        async def note(member: Member, message: Msg) -> None:
            if not opened.done():
                opened.set_result(member)

        client, password = Client(), self.nats.passwords[role]
        await client.connect(self.nats.url, user=role, password=password)
        try:
            for name, instance in self.instances().items():
                if subjects.role_of(instance) == role:
                    told = partial(note, self.member(name))
                    await client.subscribe(subjects.open_at(instance), cb=told)
            await client.flush()
            yield opened
        finally:
            await client.close()

    async def serving(self, role: str, *, seconds: float = 20.0) -> Member:
        """Return the process of a role that serves a call, as soon as one does."""
        async with asyncio.timeout(seconds):
            while True:
                if (found := await self._first_active(role)) is not None:
                    return found
                await asyncio.sleep(0.001)

    async def _first_active(self, role: str) -> Member | None:
        """Ask all processes of a role at the same time; return the first that answers that it serves a call."""
        by_pid = {member.pid: member for member in self.members}

        async def asked(beat: Heartbeat) -> Member | None:
            return by_pid.get(beat.pid) if await self._active(beat) else None

        asking = [asyncio.create_task(asked(beat)) for beat in self.bus.directory.ready(role)]
        try:
            for answer in asyncio.as_completed(asking):
                if (member := await answer) is not None:
                    return member
            return None
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _active(self, beat: Heartbeat) -> float:
        subject = f"$SRV.STATS.motet-{beat.role}.{beat.instance}"
        try:
            reply = await self.client.request(subject, b"", timeout=1.0)
        except (nats.errors.Error, TimeoutError):
            return 0.0
        return float(json.loads(reply.data)["endpoints"][0]["data"]["active"])

    # ---------------------------------------------------------------------------------------------------------- blows
    async def kill(self, name: str) -> None:
        """SIGKILL. NATS comes back on its port, everything else as another process."""
        if name == NATS:
            await self.nats.kill()
            await self.nats.start()
            return
        pid = self.member(name).pid
        self._struck.add(pid)
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(pid, signal.SIGKILL)

    def pid(self, name: str) -> int:
        return self.nats.pid if name == NATS else self.member(name).pid

    async def slow(self, name: str, seconds: float) -> None:
        """Let a process run a fifth of the time, for a while."""
        over = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < over:
            await self.pause(name, _SLOW[1])
            await asyncio.sleep(_SLOW[0])

    async def limit(self, name: str, what: str, seconds: float) -> None:
        """Let a process get no more memory, or write to no file, for a while; it may end of that."""
        pid = self.pid(name)
        self._struck.add(pid)
        kind = resource.RLIMIT_AS if what == "memory" else resource.RLIMIT_FSIZE
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            room = psutil.Process(pid).memory_info().vms + _ROOM if what == "memory" else 0
            before = resource.prlimit(pid, kind)
            resource.prlimit(pid, kind, (room, before[1]))
            await asyncio.sleep(seconds)
            resource.prlimit(pid, kind, before)

    async def pause(self, name: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        pid = self.pid(name)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(seconds)
            finally:
                os.kill(pid, signal.SIGCONT)

    async def cut(self, name: str) -> None:
        """Cut a process' connections to NATS; NATS loses all of them."""
        for member in self.members:
            if name in (NATS, member.name):
                member.line.cut()

    def member(self, name: str) -> Member:
        return next(member for member in self.members if member.name == name)


@asynccontextmanager
async def processes(store: Path | None = None) -> AsyncIterator[Processes]:
    """Run a nats-server without any process yet; with JetStream in the folder `store`, if given."""
    async with NatsServer(store=store) as server, AsyncExitStack() as exits:
        light = await exits.enter_async_context(ForkServer(*_LIGHT, lacking=("torch",)))
        heavy = await exits.enter_async_context(ForkServer(*_LOADED))
        bus = await server.bus("operator")
        exits.push_async_callback(bus.close)
        client = Client()
        password = server.passwords["operator"]
        await client.connect(
            server.url, user="operator", password=password, max_reconnect_attempts=-1
        )
        exits.push_async_callback(client.close)
        yield Processes(server, bus, client, light, heavy, exits)
