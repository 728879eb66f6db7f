"""One HTTP request on the raw ASGI path, as the streaming endpoints see it.

FastAPI serves what is small and rare. Streams are served here: a response is a few byte strings, and each layer
between them and the socket costs as much as a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from motet_shared.errors import BadRequest, PayloadTooLarge

from .chunks import CHUNKS, Chunks
from .problems import Problem

if TYPE_CHECKING:
    from .tenants import Tenant

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
_SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


class ClientGone(Exception):
    """The client has closed the connection; nobody is left to answer."""


def header(scope: Scope, name: bytes) -> bytes:
    """The value of a header (lower-case name), empty if it is missing."""
    return next((value for key, value in scope["headers"] if key == name), b"")


def request_id(scope: Scope) -> str:
    """The client's `x-request-id` if it is fit for a log line, else a new one."""
    given = header(scope, b"x-request-id")
    return given.decode() if _REQUEST_ID.fullmatch(given) else "req_" + secrets.token_hex(12)


class Exchange:
    """One request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        self.scope = scope
        self.request_id = request_id(scope)
        self.started = False
        self.finished = False
        self.status = 0
        self.content: list[tuple[bytes, bytes]] = _SSE  # headers of a response that streams
        self.told: Callable[[], Headers] = tuple  # headers of any response, as they are when it begins
        self._tenant: Tenant | None = None
        self._receive = receive
        self._send = send
        self._held = b""
        chunks: Chunks | None = scope.get("extensions", {}).get(CHUNKS)
        self._write_chunk = chunks.write if chunks is not None else self._write_message
        self._start = chunks.start if chunks is not None else self._start_message

    @property
    def tenant(self) -> Tenant:
        """Whose request it is. Set once, before an endpoint gets it."""
        if self._tenant is None:
            raise RuntimeError("nobody has asked who this is")
        return self._tenant

    @tenant.setter
    def tenant(self, tenant: Tenant) -> None:
        self._tenant = tenant

    @property
    def sends_events(self) -> bool:
        """Whether what streams is server-sent events."""
        return self.content is _SSE

    # ---------------------------------------------------------------------------------------------------- request
    async def body(self, limit: int) -> bytes:
        """The whole body. PayloadTooLarge as soon as it is known to exceed `limit` bytes."""
        length = header(self.scope, b"content-length")
        if length.isdigit() and int(length) > limit:
            raise _too_large(int(length), limit)
        parts, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_large(size, limit)
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def discard(self, most: int, seconds: float) -> None:
        """Read what still comes of a refused body, within bounds: a client that is sending sees no answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while most > 0:
                    message = await self._receive()
                    most -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return

    @asynccontextmanager
    async def while_connected(self) -> AsyncIterator[None]:
        """Cancels the block when the client leaves, and raises ClientGone then. Read the body first."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("while_connected needs a task")
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await self._receive())["type"] != "http.disconnect":
                pass
            if not self.finished:
                gone = True
                task.cancel()

        watcher = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            if not gone or task.uncancel() > 0:
                raise
            raise ClientGone from None
        finally:
            watcher.cancel()

    # --------------------------------------------------------------------------------------------------- response
    async def reply(
        self, status: int, body: bytes, headers: Headers = (), content_type: bytes = b"application/json"
    ) -> None:
        """A complete response."""
        self.started = self.finished = True
        self.status = status
        fixed = [
            (b"content-type", content_type),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self.request_id.encode()),
            *self.told(),
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
        await self._send({"type": "http.response.body", "body": body})

    async def fail(self, problem: Problem) -> None:
        await self.reply(problem.status, problem.body(), problem.headers())

    def hold(self, data: bytes) -> None:
        """Send events with the next `write`, or with `finish`."""
        self._held += data

    async def write(self, data: bytes) -> None:
        """Send events now; waits while the client does not read. The first call sends the headers."""
        if self._held:
            data, self._held = self._held + data, b""
        if self.started:
            await self._write_chunk(data)
        else:
            self.started = True
            self.status = 200
            headers = [*self.content, (b"x-request-id", self.request_id.encode()), *self.told()]
            await self._start({"type": "http.response.start", "status": 200, "headers": headers}, data)

    async def _start_message(self, head: MutableMapping[str, Any], data: bytes) -> None:
        await self._send(head)
        await self._write_message(data)

    async def _write_message(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes) -> None:
        """Send the last events and end the response."""
        if not self.started:
            await self.write(b"")
        data, self._held = self._held + data, b""
        self.finished = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})


def _too_large(size: int, limit: int) -> BadRequest:
    return PayloadTooLarge(f"the body has at least {size} bytes; at most {limit} are accepted (--max-body)")
