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
from motet_gateway.kept.absent import AbsentTransport
from motet_gateway.kept.intake import adopted
from motet_gateway.kept.memory import ConnectionMemory
from motet_gateway.kept.transport import KeptConnection

_LITTLE = 4096  # bytes


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
        self._alive: KeptConnection | None = None
        self._is_away = False
        self._memory: int | None = None
        self._transport: asyncio.Transport | None = None

    def shrink(self) -> None:
        """Have the kernel take little that the client does not read."""
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LITTLE)
        self._peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LITTLE)

    async def live(self) -> None:
        """Have a gateway serve it: the first, or the next one."""
        loop = asyncio.get_running_loop()
        own = None if self._is_away else socket.socket(fileno=os.dup(self._peer.fileno()))
        if self._memory is not None:
            memory = adopted(os.dup(self._memory), own)
        elif own is not None:
            memory = ConnectionMemory.create(kernel_counts.consumed(own), kernel_counts.taken(own))
            self._memory = os.dup(memory.fd)
        if own is None or memory.is_away:
            self._is_away = True
            if own is not None:
                own.close()
            connection = self._serve(memory)
            connection.connection_made(AbsentTransport(connection))
            return
        own.setblocking(False)
        connection = self._serve(memory)
        self._transport, _ = await loop.connect_accepted_socket(lambda: connection, own)

    def _serve(self, memory: ConnectionMemory) -> KeptConnection:
        state = State()
        connection = self._alive = KeptConnection(
            memory,
            lambda: ChunkProtocol(self._config, state, {}),
            lambda: self._end(connection),
            adopted=self.lives > 0,
            away=lambda: self._leave(connection),
        )
        self.lives += 1
        return connection

    def _end(self, connection: KeptConnection) -> None:
        """Keep the connection no longer, as the descriptor store does, unless its gateway has died."""
        if connection is self._alive:
            self._peer.close()

    def _leave(self, connection: KeptConnection) -> None:
        """Keep the memory alone, as the descriptor store does."""
        if connection is self._alive:
            connection.memory.set_away()
            self._is_away = True

    async def die(self) -> None:
        """End the gateway as by a signal: nothing more is read, written or recorded."""
        assert self._transport is not None
        dead, self._alive = self._alive, None
        assert dead is not None
        dead.journal.forgotten = True
        self._transport.abort()
        await asyncio.sleep(0.02)

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
