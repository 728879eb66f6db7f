"""An HTTP protocol for uvicorn that writes the chunks of a stream without an ASGI message for each.

An application that finds `CHUNKS` in the scope's extensions has a function there that sends more of a body without
`content-length` which it has started. Beginning and end of the response stay ASGI messages.
"""

from __future__ import annotations

from functools import partial

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

CHUNKS = "motet.http.chunks"


class ChunkProtocol(HttpToolsProtocol):
    """uvicorn's protocol with the extension `CHUNKS`."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is not None and cycle.scope is self.scope:  # else this is an upgrade
            # The task that will read it has been made, but has not run yet.
            self.scope["extensions"] = {CHUNKS: partial(write_chunk, cycle)}  # type: ignore[dict-item]


async def write_chunk(cycle: RequestResponseCycle, data: bytes) -> None:
    """Send `data`, which must not be empty; waits while the client does not read. Nothing happens once it has left."""
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()
    if not cycle.disconnected:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
