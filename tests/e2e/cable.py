"""A cable between clients and a server, which can be cut: a TCP proxy that breaks what runs through it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from motet_shared.testing import free_port


class Cable:
    """`async with Cable.to(port) as cable:` listens on `cable.port`."""

    def __init__(self, to: int):
        self.port = free_port()
        self.sockets = 0  # WebSockets that were opened through it
        self._to = to
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def to(cls, port: int) -> AsyncIterator[Cable]:
        cable = cls(port)
        server = await asyncio.start_server(cable._on_client, "127.0.0.1", cable.port)
        try:
            yield cable
        finally:
            server.close()
            cable.cut()
            await asyncio.gather(*cable._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Break every connection, at both ends. New ones may be opened."""
        for writer in list(self._open):
            writer.transport.abort()

    async def _on_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        self._open |= {writer, back}
        ways = [asyncio.create_task(self._carry(*way)) for way in ((reader, back), (there, writer))]
        self._tasks |= set(ways)
        await asyncio.wait(ways)
        self._open -= {writer, back}
        self._tasks -= set(ways)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                self.sockets += data.startswith(b"GET /v1/realtime")
                writer.write(data)
                await writer.drain()
        with suppress(OSError):
            writer.close()
            await writer.wait_closed()
