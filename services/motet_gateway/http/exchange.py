"""Represent one HTTP request and its response on the raw ASGI path.

A streamed response is a few byte strings, and each layer between them and the socket costs as much
as a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from motet_gateway.kept.response import KEPT, KeptResponse
from motet_gateway.openai.hints import HEADER, Ignored, Surface
from motet_gateway.openai.render import error_event
from motet_gateway.tenancy.auth import Caller
from motet_gateway.tenancy.tenant import Tenant
from motet_shared.errors import BadRequest, PayloadTooLarge

from .asgi import ClientGone, Headers, Receive, Scope, Send, header, request_id
from .chunks import CHUNKS, Chunks
from .problems import ErrorFormat, Problem

log = logging.getLogger(__name__)

_SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # else nginx buffers events
]
SERVED_BY = b"motet-served-by"

NDJSON = [  # a stream of lines, each a JSON value
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Exchange:
    """Represent one request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        self.scope = scope
        self.request_id = request_id(scope)
        self.started = False
        self.finished = False
        self.is_retried = False  # True: its `Idempotency-Key` had been sent before
        self.status = 0
        self.content: list[tuple[bytes, bytes]] = _SSE  # headers of a streamed response
        self.strict = False  # True: hints are refused
        self._ignored: Ignored | None = None
        self.headers: Callable[[], Headers] = tuple  # of every response, read when it starts
        self.targets: list[str] = []  # targets of a model's chain that have served the request
        self.error_format: ErrorFormat | None = None  # None: OpenAI's
        self.caller: Caller | None = None  # set by `Guard` before the endpoint runs
        self._receive = receive
        self._send = send
        self._held = b""
        extensions = scope.get("extensions", {})
        chunks: Chunks | None = extensions.get(CHUNKS)
        self._chunks = chunks
        self._kept: KeptResponse | None = extensions.get(KEPT)
        self._write_chunk = chunks.write if chunks is not None else self._write_message
        self._start = chunks.start if chunks is not None else self._start_message

    @property
    def tenant(self) -> Tenant:
        """Return the tenant of the request. Raises RuntimeError before it is authenticated."""
        if self.caller is None:
            raise RuntimeError("the request is not authenticated yet: `tenant` is not set")
        return self.caller.tenant

    @property
    def is_repeated(self) -> bool:
        """Return True if another gateway had the whole request, and may have carried it out."""
        return self.is_retried or (self._kept is not None and self._kept.is_repeated)

    @property
    def sends_events(self) -> bool:
        """Return True if a streamed response consists of events or lines, which show errors."""
        return self.content is _SSE or self.content is NDJSON

    # ---------------------------------------------------------------------------------------------------- request
    def hints(self, surface: Surface) -> Ignored | None:
        """Return the collector of this request's hints, or None if hints are refused (`--strict`).

        The response names the hints that the collector ignored.
        """
        if not self.strict:
            self._ignored = Ignored(surface)
        return self._ignored

    @property
    def ignored(self) -> str:
        """Return the names of the ignored parameters, joined by commas."""
        return "" if self._ignored is None else self._ignored.names

    def ignore(self, name: str) -> bool:
        """Name a parameter as ignored in the response; False if hints are refused (`--strict`)."""
        if self._ignored is not None:
            self._ignored.paths[name] = None
        return self._ignored is not None

    def _common(self) -> Headers:
        """Return the headers of every response to this request."""
        notes = [(HEADER, names.encode())] if (names := self.ignored) else []
        if self.targets:
            notes.append((SERVED_BY, ", ".join(self.targets).encode()))
        return [(b"x-request-id", self.request_id.encode()), *notes, *self.headers()]

    async def body(self, limit: int) -> bytes:
        """Return the whole request body.

        Raises PayloadTooLarge as soon as it is known to exceed `limit` bytes, ClientGone if the
        client disconnects.
        """
        parts = [part async for part in self.body_parts(limit)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def body_parts(
        self, limit: int, setting: str = "--max-body"
    ) -> AsyncGenerator[bytes, None]:
        """Yield the request body as it arrives. Raises like `body`; `setting` sets the limit."""
        length = header(self.scope, b"content-length")
        if length.isdigit() and int(length) > limit:
            raise _too_large(int(length), limit, setting)
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_large(size, limit, setting)
            yield part
            if not message.get("more_body", False):
                return

    def put_back(self, body: bytes) -> None:
        """Have the whole request body read once more."""
        receive, is_read = self._receive, False

        async def again() -> MutableMapping[str, Any]:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        self._receive = again

    async def discard(self, most: int, seconds: float) -> None:
        """Read and drop the rest of a refused body: at most `most` bytes, for at most `seconds`.

        A client that is still sending would not see the answer.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while most > 0:
                    message = await self._receive()
                    most -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return

    @asynccontextmanager
    async def while_connected(self) -> AsyncIterator[None]:
        """Cancel the block when the client disconnects, and raise ClientGone then.

        The request body must have been read before. Raises RuntimeError outside of a task.
        """
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
    def send_through(self, wrap: Callable[[Send], Send]) -> None:
        """Send the response through a function that may change its ASGI messages."""
        self._send = wrap(self._send)
        self._chunks = None
        self._write_chunk, self._start = self._write_message, self._start_message

    async def reply(
        self,
        status: int,
        body: bytes,
        headers: Headers = (),
        content_type: bytes = b"application/json",
    ) -> None:
        """Send a complete response."""
        self.started = self.finished = True
        self.status = status
        fixed = [
            (b"content-type", content_type),
            (b"content-length", b"%d" % len(body)),
            *self._common(),
        ]
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [*fixed, *headers]}
        )
        await self._send({"type": "http.response.body", "body": body})

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send an ASGI message of an application that answers this request in our place."""
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            self.content = message["headers"]
            message["headers"] = [*message["headers"], *self._common()]
        await self._send(message)

    async def fail(self, problem: Problem) -> None:
        """Report an error: as the response, or if that has started, as the end of its stream."""
        if not self.started:
            made = self.error_format
            body = problem.body() if made is None else made.body(problem)
            await self.reply(problem.status, body, problem.headers())
        elif self.sends_events:
            render = error_event if self.error_format is None else self.error_format.event
            await self.finish(render(problem))
        else:
            # A sound or a file cannot carry an error: left unterminated, it breaks the connection.
            self.status = problem.status
            log.warning("%s aborted after its start: %s", self.scope["path"], problem.message)

    def hold(self, data: bytes) -> None:
        """Buffer events until the next `write` or `finish`."""
        self._held += data

    async def write(self, data: bytes) -> None:
        """Send events now, after any held ones; waits while the client does not read.

        The first call also sends the response headers.
        """
        if self._held:
            data, self._held = self._held + data, b""
        if self.started:
            await self._write_chunk(data)
        else:
            self.started = True
            self.status = 200
            headers = [*self.content, *self._common()]
            await self._start(
                {"type": "http.response.start", "status": 200, "headers": headers}, data
            )

    @property
    def is_writable(self) -> bool:
        """Return True if `write_now` may be called: the response has begun, and its client reads."""
        return self.started and self._chunks is not None and self._chunks.is_writable

    def write_now(self, data: bytes) -> None:
        """Do what `write` does, which has nothing to wait for."""
        if self._chunks is None:
            raise RuntimeError("write_now: is_writable is False")
        data, self._held = self._held + data, b""
        self._chunks.write_now(data)

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


def _too_large(size: int, limit: int, setting: str) -> BadRequest:
    return PayloadTooLarge(
        f"the body has at least {size} bytes; at most {limit} are accepted ({setting})"
    )
