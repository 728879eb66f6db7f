"""Extend uvicorn's HTTP protocol to write stream chunks without an ASGI message for each.

An application that finds `CHUNKS` in the scope's extensions may start and continue a response
through that `Chunks` object. The end of the response is still an ASGI message.
"""

from __future__ import annotations

import select
from collections.abc import MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from motet_gateway.http.connections.bounds import BoundedState, Bounds
from motet_gateway.http.connections.counts import ConnectionCounts
from motet_gateway.http.connections.protocol import BoundedProtocol

from .readers import SlowReaders

CHUNKS = "motet.http.chunks"


class State(BoundedState):
    """Hold the state that all connections of a server share."""

    leaving = False  # True: each reply announces that it is the last on its connection

    def __init__(self, bounds: Bounds | None = None, counts: ConnectionCounts | None = None):
        super().__init__(bounds, counts)
        self.readers = SlowReaders()


class ChunkProtocol(BoundedProtocol):
    """Extend the bounded protocol by the ASGI extension `CHUNKS`."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is not None and cycle.scope is self.scope:  # else this is an upgrade
            state = self.server_state
            if isinstance(state, State) and state.leaving:
                cycle.keep_alive = False
            readers = state.readers if isinstance(state, State) else SlowReaders()
            # The task that reads the scope has been created but has not run yet.
            self.scope["extensions"] = {CHUNKS: Chunks(cycle, readers)}  # type: ignore[dict-item]

    @property
    def has_unread(self) -> bool:
        """Return True if the socket has received data that was not read yet.

        Closing the connection then would lose that data and reset the client's connection.
        """
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))


class Chunks:
    """Write a response body of unknown length.

    Both methods wait while the client does not read, and do nothing once it has disconnected.
    """

    def __init__(self, cycle: RequestResponseCycle, readers: SlowReaders):
        self._cycle = cycle
        self._readers = readers

    async def start(self, head: MutableMapping[str, Any], data: bytes) -> None:
        """Send the response head and the first part of the body in one write.

        `head` is an `http.response.start` message without content-length.
        """
        cycle = self._cycle
        await self._writable()
        transport, gathered = cycle.transport, _Gathered()
        cycle.transport = gathered  # type: ignore[assignment]
        try:
            await cycle.send(head)  # type: ignore[arg-type]
        finally:
            cycle.transport = transport
        if not cycle.disconnected:
            transport.write(gathered.data + (_chunk(data) if data else b""))

    async def write(self, data: bytes) -> None:
        """Send `data` as the next part of the body; empty data sends nothing."""
        cycle = self._cycle
        if cycle.flow.write_paused:
            await self._writable()
        if data and not cycle.disconnected:
            cycle.transport.write(_chunk(data))

    async def _writable(self) -> None:
        if self._cycle.flow.write_paused and not self._cycle.disconnected:
            with self._readers.waiting():
                await self._cycle.flow.drain()


class _Gathered:
    """Collect the bytes that uvicorn writes to its transport."""

    data = b""

    def write(self, data: bytes) -> None:
        self.data += data


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
