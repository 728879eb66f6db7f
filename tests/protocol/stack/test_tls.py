"""https and wss of the gateway's own listener, and which pages of other sites may use it."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import websockets

from motet_cli.commands.server import Server
from motet_cli.supervision.readiness import probe
from motet_gateway.config import GatewayConfig
from motet_gateway.service import Gateway
from motet_shared.errors import ConfigError
from motet_shared.testing import NatsServer, memory_buses, running
from support.peers.certificates import encrypted, self_signed
from support.running.refusals import refuses
from support.services.fake_services import MODEL, FakeDecode, FakeTokenizer
from support.stages.served_gateway import KEY, served_gateway

HELLO: Any = [{"role": "user", "content": "hello"}]
SITE = "https://app.example"


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Gateway]:
    async with NatsServer() as nats:
        tokenizer, decode = (
            FakeTokenizer(None, await nats.bus("tokenizer")),
            FakeDecode(None, await nats.bus("decode")),
        )
        async with running(tokenizer), running(decode), served_gateway(nats, **settings) as gateway:
            await gateway.bus.directory.wait_for(
                lambda d: d.ready("tokenizer") and d.ready("decode"), 15
            )
            yield gateway


async def test_https_and_wss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = self_signed(tmp_path)
    trust = ssl.create_default_context(cafile=str(cert))
    async with serving(tls_cert=cert, tls_key=key) as gateway:
        where = f"127.0.0.1:{gateway.port}"
        http = openai.DefaultAsyncHttpxClient(trust_env=False, verify=trust)
        client = openai.AsyncOpenAI(
            base_url=f"https://{where}/v1", api_key=KEY, max_retries=0, http_client=http
        )
        async with client:
            stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert said == "You said: hello"
        url, headers = (
            f"wss://{where}/v1/realtime?model={MODEL}",
            {"Authorization": f"Bearer {KEY}"},
        )
        async with websockets.connect(
            url, ssl=trust, additional_headers=headers, proxy=None
        ) as socket:
            assert json.loads(await socket.recv())["type"] == "session.created"
        assert (await probe("127.0.0.1", gateway.port, 10.0, tls=True)).status == 200, (
            "as `motet up` asks"
        )
        assert (await probe("127.0.0.1", gateway.port, 10.0)).status == 0, (
            "plain HTTP gets no answer"
        )
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        with Server(f"https://{where}", KEY) as server:
            assert await asyncio.to_thread(server.models) == [MODEL], "as the commands ask"
        async with httpx.AsyncClient(trust_env=False) as stranger:
            with pytest.raises(httpx.ConnectError, match=r"(?i)certificate"):
                await stranger.get(f"https://{where}/health/live")


async def refusal(**settings: Any) -> ConfigError:
    async with memory_buses("gateway") as (bus,):
        with pytest.raises(ConfigError) as caught:
            await Gateway(GatewayConfig(port=0, **settings), bus).start()
    return caught.value


async def test_files_that_are_no_pair_are_named(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path)
    other, _ = self_signed(tmp_path, "other")
    error = await refusal(tls_cert=tmp_path / "none.crt", tls_key=key)
    assert (error.param, "none.crt" in error.message) == ("tls_cert", True)
    error = await refusal(tls_cert=cert, tls_key=tmp_path / "none.key")
    assert (error.param, "none.key" in error.message) == ("tls_key", True)
    error = await refusal(tls_cert=other, tls_key=key)
    assert (error.param, "not the key of the certificate" in error.message) == ("tls_key", True)
    error = await refusal(tls_cert=cert, tls_key=encrypted(key))
    assert "passphrase" in error.message
    (tmp_path / "text").write_text("hello")
    error = await refusal(tls_cert=tmp_path / "text", tls_key=key)
    assert "in PEM" in error.message
    with refuses(ConfigError, "tls_key"):
        GatewayConfig(tls_cert=cert)
    with refuses(ConfigError, "tls_cert"):
        GatewayConfig(tls_key=key)


# -------------------------------------------------------------------------------------------------------- other sites
@pytest.fixture
async def sited() -> AsyncIterator[Gateway]:
    async with serving(allowed_origins=(SITE,)) as gateway:
        yield gateway


async def test_a_named_site_may_ask_and_read_what_is_left(sited: Gateway) -> None:
    base = f"http://127.0.0.1:{sited.port}"
    headers = {"Authorization": f"Bearer {KEY}", "Origin": SITE}
    body = {"model": MODEL, "messages": HELLO}
    async with httpx.AsyncClient(trust_env=False, base_url=base) as http:
        asked = {"Origin": SITE, "Access-Control-Request-Method": "POST",
                 "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
        allowed = await http.options("/v1/chat/completions", headers=asked)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, SITE)
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        for stream in (True, False):
            reply = await http.post(
                "/v1/chat/completions", json=body | {"stream": stream}, headers=headers
            )
            assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, SITE)
            assert "x-ratelimit-remaining-tokens" in reply.headers["access-control-expose-headers"]
        for path, sent, status in (
            ("/v1/models", headers, 200),
            ("/v1/models", {"Origin": SITE}, 401),
        ):
            reply = await http.get(path, headers=sent)
            assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (
                status,
                SITE,
            )


async def test_other_sites_may_not(sited: Gateway) -> None:
    base = f"http://127.0.0.1:{sited.port}"
    async with httpx.AsyncClient(
        trust_env=False, base_url=base, headers={"Authorization": f"Bearer {KEY}"}
    ) as http:
        for origin in (
            "https://evil.example",
            "http://app.example",
            f"{SITE}.evil.example",
            "null",
        ):
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            assert (await http.options("/v1/chat/completions", headers=asked)).status_code == 400
            reply = await http.get("/v1/models", headers={"Origin": origin})
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, "forbidden_origin")
            assert "access-control-allow-origin" not in reply.headers
        assert (await http.get("/v1/models", headers={"Origin": base})).status_code == 200, (
            "its own page"
        )
        assert (await http.get("/v1/models")).status_code == 200, "what is no browser"


@pytest.mark.parametrize(
    ("origin", "first"), [(SITE, "session.created"), ("https://evil.example", "error")]
)
async def test_a_socket_is_for_named_sites(sited: Gateway, origin: Any, first: str) -> None:
    url = f"ws://127.0.0.1:{sited.port}/v1/realtime?model={MODEL}"
    # As a browser does it, which cannot set headers.
    protocols: Any = ["realtime", f"openai-insecure-api-key.{KEY}"]
    async with websockets.connect(url, origin=origin, subprotocols=protocols, proxy=None) as socket:
        assert json.loads(await socket.recv())["type"] == first
        if first == "error":
            with pytest.raises(websockets.ConnectionClosed):
                await socket.recv()
            assert socket.close_code == 3000


@pytest.mark.parametrize(
    "origin", ["app.example", "https://app.example/", "ftp://x", "https://a.example/path", ""]
)
async def test_what_is_no_origin_is_refused(origin: str) -> None:
    error = await refusal(allowed_origins=(origin,))
    assert error.param == "allowed_origins"
