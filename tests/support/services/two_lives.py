"""Let a gateway die over one connection, in process: another one adopts what it had, at any byte."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
import websockets

from motet_gateway.http.chunks import ChunkProtocol, State
from motet_gateway.http.websocket import BurstProtocol
from motet_gateway.kept import kernel_counts
from motet_gateway.kept.memory import ConnectionMemory
from motet_gateway.kept.transport import KeptConnection


class Connection:
    """A TCP connection to `app` behind the memory that outlives its gateway."""

    def __init__(self, app: Any):
        self._config = uvicorn.Config(
            app,
            http=ChunkProtocol,
            ws=BurstProtocol,
            ws_per_message_deflate=False,
            log_config=None,
            lifespan="off",
            timeout_keep_alive=1,
        )
        self._config.load()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.client = socket.create_connection(listener.getsockname())
            self._peer, _ = listener.accept()
        self.client.setblocking(False)
        self.lives = 0
        self._dying = False
        self._memory: int | None = None
        self._transport: asyncio.Transport | None = None

    async def live(self) -> None:
        """Have a gateway serve it: the first, or the next one."""
        own = socket.socket(fileno=os.dup(self._peer.fileno()))
        own.setblocking(False)
        counts = kernel_counts.consumed(own), kernel_counts.taken(own)
        if self._memory is None:
            memory = ConnectionMemory.create(*counts)
            self._memory = os.dup(memory.fd)
        else:
            memory = ConnectionMemory.adopt(os.dup(self._memory), *counts)
        state, loop = State(), asyncio.get_running_loop()
        connection = KeptConnection(
            memory,
            lambda: ChunkProtocol(self._config, state, {}),
            self._end,
            adopted=self.lives > 0,
        )
        self.lives += 1
        self._transport, _ = await loop.connect_accepted_socket(lambda: connection, own)

    def _end(self) -> None:
        """Keep the connection no longer, as the descriptor store does, unless its gateway dies."""
        if not self._dying:
            self._peer.close()

    async def die(self) -> None:
        """End the gateway as by a signal: nothing more is read, written or recorded."""
        assert self._transport is not None
        self._dying = True
        self._transport.abort()
        await asyncio.sleep(0.02)
        self._dying = False

    async def die_and_live(self) -> None:
        """Have the next gateway serve it."""
        await self.die()
        await self.live()

    async def ask(self, request: bytes, deaths: Callable[[int], bool]) -> bytes:
        """The whole response; a gateway dies when `deaths` says so of the bytes that were received."""
        loop, got = asyncio.get_running_loop(), b""
        await self.live()
        await loop.sock_sendall(self.client, request)
        async with asyncio.timeout(100):
            while data := await loop.sock_recv(self.client, 512):
                got += data
                if self._peer.fileno() >= 0 and deaths(len(got)):
                    await self.die()
                    await self.live()
        return got

    def close(self) -> None:
        for one in (self.client, self._peer):
            one.close()
        if self._memory is not None:
            with contextlib.suppress(OSError):
                os.close(self._memory)


@contextlib.asynccontextmanager
async def kept_socket(
    app: Any, path: str, headers: dict[str, str] | None = None
) -> AsyncIterator[tuple[Connection, websockets.ClientConnection]]:
    """Open a WebSocket over a connection whose gateways die; close it at the end."""
    connection = Connection(app)
    await connection.live()
    try:
        async with websockets.connect(
            f"ws://localhost{path}",
            sock=connection.client,
            max_size=None,
            proxy=None,
            compression=None,
            additional_headers=headers,
        ) as client:
            yield connection, client
    finally:
        connection.close()
