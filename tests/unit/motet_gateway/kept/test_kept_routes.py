"""A gateway adopts a connection of which another one had read a whole request: what it does depends on the route."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn

from motet_gateway.http.chunks import ChunkProtocol, State
from motet_gateway.http.route import Route
from motet_gateway.kept import kernel_counts
from motet_gateway.kept.memory import ConnectionMemory
from motet_gateway.kept.transport import KeptConnection
from motet_gateway.routes import ROUTES
from support.clients.gateway_client import World, world
from support.services.fake_services import MODEL, words


@pytest.fixture
async def here() -> AsyncIterator[World]:
    async with world(patience=0.2) as made:
        made.tokenizer.reply = lambda request: words("one two three")
        yield made
        await made.service.close()


async def adopted(
    here: World, method: str, path: str, body: bytes, fields: str = ""
) -> tuple[bytes, list[str]]:
    """The response to a request that a gateway read before it died, and how often its connection was ended."""
    config = uvicorn.Config(here.app, http=ChunkProtocol, log_config=None, lifespan="off")
    config.load()
    state, ended = State(), list[str]()
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    request = f"{head}{fields}content-length: {len(body)}\r\n\r\n".encode() + body
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    ours.setblocking(False)
    client.setblocking(False)
    with client:
        first = ConnectionMemory.create(kernel_counts.consumed(ours), kernel_counts.taken(ours))
        client.sendall(request)
        read = 0
        async with asyncio.timeout(5):
            while read < len(request):
                await asyncio.sleep(0.001)
                read += ours.recv_into(first.buffer())
                first.in_len = read
        again = os.dup(first.fd)
        first.close()  # as by its death
        memory = ConnectionMemory.adopt(
            again, kernel_counts.consumed(ours), kernel_counts.taken(ours)
        )
        connection = KeptConnection(
            memory,
            lambda: ChunkProtocol(config, state, {}),
            lambda: ended.append("ended"),
            adopted=True,
        )
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: connection, ours)
        got = b""
        async with asyncio.timeout(10):
            while data := await loop.sock_recv(client, 65536):
                got += data
    await asyncio.sleep(0)
    return got, ended


CHAT = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()


@pytest.mark.parametrize("fields", ["", "connection: upgrade\r\nupgrade: h2c\r\n"])
async def test_a_chat_is_begun_again(fields: str, here: World) -> None:
    got, ended = await adopted(here, "POST", "/v1/chat/completions", CHAT, fields)
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert json.loads(body)["choices"][0]["message"]["content"] == "one two three"
    assert ended == ["ended"]


ONCE = [route for route in ROUTES if route.once]


@pytest.mark.parametrize("route", ONCE, ids=lambda route: f"{route.method} {route.path}")
async def test_what_may_have_been_carried_out_is_refused(route: Route, here: World) -> None:
    path = route.path.replace("{", "").replace("}", "")
    got, _ = await adopted(here, route.method, path, b"{}")
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503"), got
    assert json.loads(body)["error"]["code"] == "worker_lost"


def test_every_deletion_happens_once() -> None:
    refused = {"/api/delete"}  # Ollama's, which is refused by name
    assert [r.path for r in ROUTES if r.method == "DELETE" and not r.once] == sorted(refused)
