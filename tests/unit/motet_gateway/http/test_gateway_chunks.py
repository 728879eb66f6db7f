"""Connections of the gateway's server: what comes on them is not lost, and what is answered is well-formed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from motet_gateway.http.chunks import ChunkProtocol, State
from motet_gateway.http.exchange import Exchange

HOST = b"host: localhost\r\n"
# As Java's HttpClient asks for HTTP/2 over cleartext, and a field without a value.
UPGRADE = (
    b"connection: Upgrade, HTTP2-Settings\r\nempty:\r\nupgrade: h2c\r\n"
    b"http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
)
PLAIN = b"content-length: 11\r\n\r\nhello there"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n there\r\n0\r\n\r\n"


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


@asynccontextmanager
async def connected(app: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Serve an application, and connect to it."""
    config = uvicorn.Config(app, http=ChunkProtocol, log_config=None, lifespan="off")
    config.load()
    state = State()
    server = await asyncio.get_running_loop().create_server(
        lambda: ChunkProtocol(config, state, {}), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        async with asyncio.timeout(10):
            yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()


async def streamed(scope: Any, receive: Any, send: Any) -> None:
    http = Exchange(scope, receive, send)
    for part in (b"one", b"two"):
        await http.write(part)
    await http.finish(b"")


async def echo(scope: Any, receive: Any, send: Any) -> None:
    http = Exchange(scope, receive, send)
    await http.reply(200, await http.body(1 << 20))


async def test_head_of_a_streamed_route_has_no_body() -> None:
    async with connected(streamed) as (reader, writer):
        writer.write(b"HEAD / HTTP/1.1\r\n" + HOST + b"\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"connection: close" not in head
        writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"connection: close\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert body == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


@pytest.mark.parametrize("size", [1000, 40, 1], ids=["whole", "pieces", "bytes"])
@pytest.mark.parametrize("framed", [PLAIN, CHUNKED], ids=["plain", "chunked"])
async def test_a_body_behind_an_upgrade_that_is_declined_is_read(framed: bytes, size: int) -> None:
    request = b"POST / HTTP/1.1\r\n" + HOST + UPGRADE + framed
    async with connected(echo) as (reader, writer):
        for _ in range(2):  # the connection is used again
            for start in range(0, len(request), size):
                writer.write(request[start : start + size])
                await asyncio.sleep(0)
            reply = await reader.readuntil(b"hello there")
            assert reply.startswith(b"HTTP/1.1 200")
            assert reply.count(b"HTTP/1.1") == 1


async def test_requests_behind_an_upgrade_that_is_declined_are_answered() -> None:
    first = b"GET / HTTP/1.1\r\n" + HOST + UPGRADE + b"\r\n"
    second = b"POST / HTTP/1.1\r\n" + HOST + UPGRADE + PLAIN
    last = b"POST / HTTP/1.1\r\n" + HOST + b"connection: close\r\n" + PLAIN
    async with connected(echo) as (reader, writer):
        writer.write(first + second + last)
        reply = await reader.read()
    assert reply.count(b"HTTP/1.1 200") == 3
    assert reply.count(b"hello there") == 2
    assert reply.endswith(b"hello there")
