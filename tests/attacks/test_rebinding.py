"""DNS rebinding: a page whose own name resolves to this server asks it with that name as `Host` and as `Origin`."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import websockets

from motet_gateway.config import GatewayConfig
from motet_gateway.http.hosts import Hosts
from motet_gateway.service import Gateway
from motet_shared.errors import ConfigError
from motet_shared.testing import NatsServer, running
from support.services.drawing_services import BRUSH, FakeDiffusion
from support.services.fake_services import MODEL, FakeDecode, FakeTokenizer

ATTACKER = "rebound.attacker.example"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    """Without keys, as on a desktop; one more name is its own."""
    async with NatsServer(store=tmp_path) as nats:
        tokenizer, decode = (
            FakeTokenizer(None, await nats.bus("tokenizer")),
            FakeDecode(None, await nats.bus("decode")),
        )
        brush = FakeDiffusion(await nats.bus("diffusion"))
        config = GatewayConfig(
            port=0, drain_timeout=1.0, allowed_hosts=("pictures.example", "*.svc")
        )
        made = Gateway(config, await nats.bus("gateway"))
        async with running(tokenizer), running(decode), running(brush), running(made):
            roles = ("tokenizer", "decode", "diffusion")
            await made.bus.directory.wait_for(lambda d: all(d.ready(role) for role in roles), 15)
            yield made


def rebound(gateway: Gateway, host: str = ATTACKER) -> dict[str, str]:
    """What a browser sends for a page of http://HOST:PORT."""
    netloc = f"{host}:{gateway.port}"
    return {"host": netloc, "origin": f"http://{netloc}"}


async def ask(
    gateway: Gateway, method: str, path: str, headers: dict[str, str], body: Any = None
) -> httpx.Response:
    async with httpx.AsyncClient(
        trust_env=False, base_url=f"http://127.0.0.1:{gateway.port}"
    ) as http:
        return await http.request(method, path, headers=headers, json=body)


def check_refused(answer: httpx.Response) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (421, "host_not_allowed", "Host")
    assert error["type"] == "invalid_request_error"
    assert "--allowed-hosts" in error["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "sse"])
async def test_a_foreign_name_may_not_chat(gateway: Gateway, stream: bool) -> None:
    body = {**CHAT, "stream": stream}
    check_refused(await ask(gateway, "POST", "/v1/chat/completions", rebound(gateway), body))
    own = await ask(gateway, "POST", "/v1/chat/completions", rebound(gateway, "localhost"), body)
    assert own.status_code == 200
    assert "hello" in own.text


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/chat.js",
        "/metrics",
        "/metrics/replies",
        "/metrics/stack",
        "/v1/models",
        "/health",
        "/images/x.png",
    ],
)
async def test_a_foreign_name_may_read_nothing(gateway: Gateway, path: str) -> None:
    check_refused(await ask(gateway, "GET", path, rebound(gateway)))
    check_refused(await ask(gateway, "GET", path, {"host": ATTACKER}))


async def test_a_foreign_name_opens_no_session(gateway: Gateway) -> None:
    url = f"ws://{{}}:{gateway.port}/v1/realtime?model={MODEL}"
    where: Any = {"host": "127.0.0.1", "port": gateway.port, "proxy": None}
    foreign, own = ({"Origin": f"http://{host}:{gateway.port}"} for host in (ATTACKER, "localhost"))
    with pytest.raises(websockets.InvalidStatus) as caught:
        async with websockets.connect(url.format(ATTACKER), additional_headers=foreign, **where):
            pass
    response = caught.value.response
    assert response.status_code == 421
    assert json.loads(response.body)["error"]["code"] == "host_not_allowed"
    async with websockets.connect(
        url.format("localhost"), additional_headers=own, **where
    ) as session:
        assert json.loads(await session.recv())["type"] == "session.created"


async def test_own_names_may_ask(gateway: Gateway) -> None:
    for host in (
        *("127.0.0.1", "192.0.2.7", "[::1]", "[2001:db8::1]"),
        *("localhost", "LOCALHOST.", "app.localhost", socket.gethostname()),
        *("pictures.example", "Pictures.Example.", "gateway.motet.svc"),
    ):
        for header in (host, f"{host}:80", f"{host}:{gateway.port}"):
            assert (await ask(gateway, "GET", "/v1/models", {"host": header})).status_code == 200, (
                header
            )


async def test_names_that_look_like_own_ones_may_not(gateway: Gateway) -> None:
    for host in (
        *(
            "localhost.attacker.example",
            "notlocalhost",
            "127.0.0.1.attacker.example",
            "0x7f.1",
            "svc",
        ),
        *("pictures.example.attacker.example", "x.pictures.example", "evil-svc", "[1::2::3]"),
    ):
        check_refused(await ask(gateway, "GET", "/v1/models", {"host": host}))


@pytest.mark.parametrize(
    "fields",
    [
        b"",
        b"Host:\r\n",
        b"Host: localhost\r\nHost: rebound.attacker.example\r\n",
        b"Host: localhost\r\nhost: localhost\r\n",
        b"Host: localhost/path\r\n",
        b"Host: user@localhost\r\n",
        b"Host: localhost, localhost\r\n",
        b"Host: localhost:port\r\n",
        b"Host: [::1\r\n",
        b"Host: \xef\xbc\x91\xef\xbc\x92\xef\xbc\x97.0.0.1\r\n",
    ],
)
async def test_what_is_no_host_is_a_bad_request(gateway: Gateway, fields: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n" + fields + b"\r\n")
    reply = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert reply.split()[1] == b"400"
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["param"] == "Host"


async def test_pictures_are_where_the_checked_name_says(gateway: Gateway) -> None:
    body = {"model": BRUSH, "prompt": "x", "response_format": "url"}
    check_refused(await ask(gateway, "POST", "/v1/images/generations", rebound(gateway), body))
    check_refused(await ask(gateway, "POST", "/v1/images/jobs", rebound(gateway), body))
    answer = await ask(
        gateway, "POST", "/v1/images/generations", {"host": "Pictures.Example:8443"}, body
    )
    assert answer.status_code == 200, answer.text
    url = urlsplit(answer.json()["data"][0]["url"])
    assert url.netloc == "pictures.example:8443"
    picture = await ask(gateway, "GET", url.path, {"host": "pictures.example"})
    assert (picture.status_code, picture.headers["content-type"]) == (200, "image/png")


# ---------------------------------------------------------------------------------------------------------- the setting
def scope(host: str) -> dict[str, Any]:
    return {"headers": [(b"host", host.encode())]}


def test_a_star_takes_any_name() -> None:
    Hosts(("*",)).check(scope(ATTACKER))


def test_the_name_to_listen_on_is_one() -> None:
    Hosts((), "Box.example").check(scope("box.example:80"))


@pytest.mark.parametrize("name", ["", "http://x.example", "x/y", "a b", "*.", "**", "x.*", "[::1]"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Hosts((name,))
    assert caught.value.param == "allowed_hosts"
