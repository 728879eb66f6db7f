"""Call the gateway's ASGI application in process: without sockets, with full control over reads."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from motet_gateway.config import GatewayConfig
from motet_gateway.context import GatewayContext
from motet_gateway.http.app import App
from motet_gateway.http.chunks import CHUNKS
from motet_gateway.tenancy.buckets import Clock
from motet_shared.process.telemetry import Metrics
from motet_shared.testing import MemoryHub, memory_buses, settle
from motet_shared.wire.bus import Bus
from support.services.fake_services import MODEL, FakeTokenizer, fake_services

HELLO = [{"role": "user", "content": "hello"}]


@dataclass
class World:
    """Run a gateway with fake services on a bus in memory."""

    service: GatewayContext
    app: App
    tokenizer: FakeTokenizer
    hub: MemoryHub
    buses: list[Bus]

    def ask(
        self,
        path: str = "/v1/chat/completions",
        *,
        headers: dict[str, str] | None = None,
        **fields: Any,
    ) -> Http:
        """Start a request with these fields besides model and messages."""
        base = (
            {"model": MODEL, "messages": HELLO}
            if path.endswith("chat/completions")
            else {"model": MODEL}
        )
        return Http(self.app, path, json.dumps(base | fields).encode(), headers=headers)

    async def post(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> Http:
        """Return the answer to a POST of exactly this body."""
        return await Http(self.app, path, json.dumps(body).encode(), headers=headers).done()

    def get(self, path: str, headers: dict[str, str] | None = None) -> Http:
        return Http(self.app, path, b"", "GET", headers)


@asynccontextmanager
async def world(*, clock: Clock = time.monotonic_ns, **settings: Any) -> AsyncIterator[World]:
    """Run a World.

    clock: of the rate limits; the bus has its own.
    """
    hub = MemoryHub()
    async with (
        memory_buses("gateway", "tokenizer", "decode", hub=hub) as buses,
        fake_services(buses[1], buses[2]) as tokenizer,
    ):
        await settle()
        service = GatewayContext(
            GatewayConfig(**settings), buses[0], Metrics("gateway", buses[0].instance), clock
        )
        yield World(service, App(service), tokenizer, hub, buses)


class Http:
    """Send one request; `read` is how much the client has read."""

    def __init__(
        self,
        app: App,
        path: str,
        body: bytes = b"",
        method: str = "POST",
        headers: dict[str, str] | None = None,
        query: str = "",
        extensions: dict[str, Any] | None = None,
    ):
        self.status = 0
        self.headers: dict[str, str] = {}
        self.chunks: list[bytes] = []
        self.complete = False
        self.reading = asyncio.Event()
        self.reading.set()
        self._left = asyncio.Event()
        self._body: bytes | None = body
        given = {"host": "here.localhost", **(headers or {})}
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "extensions": extensions or {},
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reading.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.chunks.append(message.get("body", b""))
            self.complete = not message.get("more_body", False)

    def leave(self) -> None:
        self._left.set()

    async def done(self) -> Http:
        await asyncio.wait_for(self.task, 10)
        return self

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """Return the data of server-sent events, "[DONE]" included."""
        lines = [line[6:] for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    def text(self) -> str:
        """Return the text of a chat stream."""
        choices = [
            choice for event in self.events() if "choices" in event for choice in event["choices"]
        ]
        return "".join(choice["delta"].get("content") or "" for choice in choices)


class ChunkedHttp(Http):
    """Send one request over a connection that writes chunks as the gateway's own server does.

    written_now: chunks that were written without a task.
    """

    def __init__(self, app: App, path: str, body: bytes):
        self.written_now = 0
        super().__init__(app, path, body, extensions={CHUNKS: self})

    async def start(self, head: Any, data: bytes) -> None:
        await self._send(head)
        self.chunks.append(data)

    async def write(self, data: bytes) -> None:
        await self.reading.wait()
        self.chunks.append(data)

    @property
    def is_writable(self) -> bool:
        return self.reading.is_set()

    def write_now(self, data: bytes) -> None:
        self.written_now += 1
        self.chunks.append(data)


@dataclass
class Socket:
    """Act as the client's end of a WebSocket."""

    app: App
    query: dict[str, str] = field(default_factory=lambda: {"model": MODEL})
    path: str = "/v1/realtime"
    headers: dict[str, str] = field(default_factory=dict)
    subprotocols: list[str] = field(default_factory=list)
    closed: int | None = None
    accepted: dict[str, Any] | None = None
    texts: list[str] = field(default_factory=list)  # of all events, as they came
    sound: bytes = b""  # of all binary messages
    broken: bool = False

    def __post_init__(self) -> None:
        self.reading = asyncio.Event()
        self.reading.set()
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        given = {"host": "here.localhost", **self.headers}
        scope = {
            "type": "websocket",
            "path": self.path,
            "query_string": urlencode(self.query).encode(),
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "subprotocols": self.subprotocols,
        }
        self._incoming.put_nowait({"type": "websocket.connect"})
        self.task = asyncio.create_task(self.app(scope, self._incoming.get, self._send))

    async def _send(self, message: Any) -> None:
        await self.reading.wait()
        if self.broken:
            raise OSError
        if message["type"] == "websocket.accept":
            self.accepted = message
        elif message["type"] == "websocket.close":
            self.closed = message["code"]
            self._incoming.put_nowait({"type": "websocket.disconnect", "code": message["code"]})
        elif "bytes" in message:
            self.sound += message["bytes"]
        else:
            self.texts.append(message["text"])
            self._events.put_nowait(json.loads(message["text"]))

    def send(self, kind: str, **fields: Any) -> None:
        self.send_raw(json.dumps({"type": kind, **fields}))

    def send_raw(self, data: str | bytes) -> None:
        key = "text" if isinstance(data, str) else "bytes"
        self._incoming.put_nowait({"type": "websocket.receive", key: data})

    def say(self, text: str) -> None:
        item = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": text}],
        }
        self.send("conversation.item.create", item=item)

    async def receive(self) -> Any:
        return await asyncio.wait_for(self._events.get(), 20)

    async def until(self, *kinds: str) -> list[Any]:
        """Return the events up to the first of these types."""
        events = [await self.receive()]
        while events[-1]["type"] not in kinds:
            events.append(await self.receive())
        return events

    async def expect(self, kind: str) -> Any:
        """Return the next event, which must be of this type."""
        event = await self.receive()
        assert event["type"] == kind, event
        return event

    def pending(self) -> int:
        return self._events.qsize()

    async def drop(self) -> None:
        """Break the connection."""
        self.broken = True
        self.reading.set()
        self._incoming.put_nowait({"type": "websocket.disconnect", "code": 1006})
        await asyncio.wait_for(self.task, 10)

    async def leave(self) -> None:
        self._incoming.put_nowait({"type": "websocket.disconnect", "code": 1000})
        await asyncio.wait_for(self.task, 5)


@asynccontextmanager
async def session(app: App, **options: Any) -> AsyncIterator[Socket]:
    """Return a socket after its `session.created`."""
    socket = Socket(app, **options)
    await socket.expect("session.created")
    yield socket
    await socket.leave()
