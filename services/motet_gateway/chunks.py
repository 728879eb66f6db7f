"""An HTTP protocol for uvicorn that writes the chunks of a stream without an ASGI message for each.

An application that finds `CHUNKS` in the scope's extensions may start a response and go on with it through these
`Chunks`. The end of the response stays an ASGI message.
"""

from __future__ import annotations

import select
from collections.abc import MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from .readers import Readers

CHUNKS = "motet.http.chunks"


class State(ServerState):
    """What all connections of a server share."""

    leaving = False  # whether each reply is the last on its connection, and says so

    def __init__(self) -> None:
        super().__init__()
        self.readers = Readers()


class ChunkProtocol(HttpToolsProtocol):
    """uvicorn's protocol with the extension `CHUNKS`."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is not None and cycle.scope is self.scope:  # else this is an upgrade
            state = self.server_state
            if isinstance(state, State) and state.leaving:
                cycle.keep_alive = False
            readers = state.readers if isinstance(state, State) else Readers()
            # The task that will read it has been made, but has not run yet.
            self.scope["extensions"] = {CHUNKS: Chunks(cycle, readers)}  # type: ignore[dict-item]

    @property
    def has_unread(self) -> bool:
        """Whether something has come that nobody has read yet: who closes now, loses it, and the client is cut off."""
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))


class Chunks:
    """A body of unknown length. Both calls wait while the client does not read; once it has left, nothing happens."""

    def __init__(self, cycle: RequestResponseCycle, readers: Readers):
        self._cycle = cycle
        self._readers = readers

    async def start(self, head: MutableMapping[str, Any], data: bytes) -> None:
        """`head` (an `http.response.start` without content-length) and the first part of the body, in one write."""
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
        """More of the body, if `data` is not empty."""
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
    """Takes what uvicorn writes."""

    data = b""

    def write(self, data: bytes) -> None:
        self.data += data


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
