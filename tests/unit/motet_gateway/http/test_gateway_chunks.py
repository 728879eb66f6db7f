"""Connections of the gateway that end: what has come on them is not lost."""

from __future__ import annotations

import asyncio
import socket

import uvicorn

from motet_gateway.http.chunks import ChunkProtocol, State


async def test_what_has_come_and_was_not_read_is_noticed() -> None:
    config, state = uvicorn.Config(lambda *_: None, http=ChunkProtocol, log_config=None), State()
    config.load()
    server = await asyncio.get_running_loop().create_server(
        lambda: ChunkProtocol(config, state, {}), "127.0.0.1", 0
    )
    with socket.create_connection(server.sockets[0].getsockname(), timeout=10) as client:
        async with asyncio.timeout(10):
            while not state.connections:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            (connection,) = state.connections
            assert isinstance(connection, ChunkProtocol)
            assert not connection.has_unread
            client.sendall(b"GET ")
            assert connection.has_unread, "before the loop had time to read it"
            while connection.has_unread:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        connection.shutdown()
    server.close()
    await server.wait_closed()
