"""Extend uvicorn's HTTP protocol to write stream chunks without an ASGI message for each.

An application that finds `CHUNKS` in the scope's extensions may start and continue a response
through that `Chunks` object. The end of the response is still an ASGI message.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from motet_gateway.http.connections.bounds import BoundedState, Bounds
from motet_gateway.http.connections.counts import ConnectionCounts
from motet_gateway.http.connections.protocol import BoundedProtocol
from motet_gateway.kept.response import KEPT, KeptResponse, kept_app
from motet_gateway.kept.transport import KeptTransport

from .readers import SlowReaders

CHUNKS = "motet.http.chunks"


class State(BoundedState):
    """Hold the state that all connections of a server share."""

    leaving = False  # True: each reply announces that it is the last on its connection

    def __init__(self, bounds: Bounds | None = None, counts: ConnectionCounts | None = None):
        super().__init__(bounds, counts)
        self.readers = SlowReaders()


class ChunkProtocol(BoundedProtocol):
    """Extend the bounded protocol by the ASGI extensions `CHUNKS`, and `KEPT` behind a descriptor store.

    A response to HEAD has no body, so that its request has no `CHUNKS`.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if isinstance(transport, KeptTransport):
            self.app = kept_app(self.app)
        super().connection_made(transport)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is not None and cycle.scope is self.scope:  # else this is an upgrade
            state = self.server_state
            if isinstance(state, State) and state.leaving:
                cycle.keep_alive = False
            readers = state.readers if isinstance(state, State) else SlowReaders()
            # The task that reads the scope has been created but has not run yet.
            chunks = Chunks(cycle, readers)
            # uvicorn drops the body of a response to HEAD from ASGI messages alone.
            is_bodyless = self.scope["method"] == "HEAD"
            extensions: dict[str, Any] = {} if is_bodyless else {CHUNKS: chunks}
            if isinstance(self.transport, KeptTransport):
                if self.pipeline:
                    self.transport.forget()  # whose bytes are whose is known for one request only
                kept = KeptResponse(self.transport, chunks.writable)
                extensions[KEPT] = cycle.transport = kept  # type: ignore[assignment]
            self.scope["extensions"] = extensions

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self.is_between_requests:
            return  # an upgrade is declined, and the head of its request comes again
        if self.cycle is not None and isinstance(self.cycle.transport, KeptResponse):
            self.cycle.transport.received()
        self._forget_answered()

    def on_response_complete(self) -> None:
        cycle = self.cycle
        if cycle is not None and isinstance(cycle.transport, KeptResponse):
            cycle.transport.flush()
        super().on_response_complete()
        self._forget_answered()

    def _forget_answered(self) -> None:
        """Have the memory of the connection forget a request that was read and answered.

        The last one is not forgotten: a gateway that adopts it closes the connection, too.
        """
        transport = self.transport
        if (
            isinstance(transport, KeptTransport)
            and self.is_between_requests
            and self.cycle is not None
            and self.cycle.response_complete
            and self.cycle.keep_alive
        ):
            transport.next_request()

    @property
    def has_unread(self) -> bool:
        """Return True if the socket has received data that was not read yet.

        Closing the connection then would lose that data and reset the client's connection.
        """
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    @property
    def is_unanswered(self) -> bool:
        """Return True if a request has come, part of it at least, and its response has not begun."""
        if self.transport.is_closing():
            return False
        return self.has_unread or (self.cycle is not None and not self.cycle.response_started)


class Chunks:
    """Write a response body of unknown length.

    `start` and `write` wait while the client does not read, and do nothing once it has disconnected.
    """

    def __init__(self, cycle: RequestResponseCycle, readers: SlowReaders):
        self._cycle = cycle
        self._readers = readers

    async def start(self, head: MutableMapping[str, Any], data: bytes) -> None:
        """Send the response head and the first part of the body in one write.

        `head` is an `http.response.start` message without content-length.
        """
        cycle = self._cycle
        await self.writable()
        transport, gathered = cycle.transport, _Gathered()
        cycle.transport = gathered  # type: ignore[assignment]
        try:
            await cycle.send(head)  # type: ignore[arg-type]
        finally:
            cycle.transport = transport
        if not cycle.disconnected:
            if isinstance(transport, KeptResponse):
                transport.stream()
            transport.write(gathered.data + (_chunk(data) if data else b""))

    async def write(self, data: bytes) -> None:
        """Send `data` as the next part of the body; empty data sends nothing."""
        cycle = self._cycle
        if cycle.flow.write_paused:
            await self.writable()
        if data and not cycle.disconnected:
            cycle.transport.write(_chunk(data))

    @property
    def is_writable(self) -> bool:
        """Return True if `write_now` may be called: the client is connected and reads."""
        return not (self._cycle.flow.write_paused or self._cycle.disconnected)

    def write_now(self, data: bytes) -> None:
        """Send `data` as the next part of the body; empty data sends nothing."""
        if data:
            self._cycle.transport.write(_chunk(data))

    async def writable(self) -> None:
        """Wait while the client does not read."""
        while self._cycle.flow.write_paused and not self._cycle.disconnected:
            with self._readers.waiting():
                await self._cycle.flow.drain()


class _Gathered:
    """Collect the bytes that uvicorn writes to its transport."""

    data = b""

    def write(self, data: bytes) -> None:
        self.data += data


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
