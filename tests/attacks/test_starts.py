"""A gateway that begins before its services: what it says of them, and what becomes of requests for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest

from motet_gateway.config import GatewayConfig
from motet_gateway.service import Gateway
from motet_shared.errors import ConfigError
from motet_shared.testing import NatsServer, running
from support.services.drawing_services import BRUSH, FakeDiffusion
from support.services.fake_services import MODEL, FakeDecode, FakeTokenizer

EXPECTED = (f"decode={MODEL}", f"diffusion={BRUSH}")
QUICK = 20.0  # seconds for a refusal; a request that waits has its patience or its deadline
PATIENCE = 1.0


@dataclass
class Stage:
    """A gateway without services, and a client of it."""

    nats: NatsServer
    gateway: Gateway
    http: httpx.AsyncClient

    async def ready(self, model: str = "") -> int:
        return (
            await self.http.get("/health/ready", params={"model": model} if model else {})
        ).status_code

    async def listed(self) -> list[tuple[str, str, str]]:
        data = (await self.http.get("/v1/models")).json()["data"]
        return [(model["id"], model["kind"], model["status"]) for model in data]

    async def chat(self) -> httpx.Response:
        messages = [{"role": "user", "content": "hello"}]
        return await self.http.post(
            "/v1/chat/completions", json={"model": MODEL, "messages": messages}
        )

    async def draw(self, model: str = BRUSH) -> httpx.Response:
        return await self.http.post(
            "/v1/images/generations", json={"model": model, "prompt": "a circle"}
        )

    async def known(self, role: str, count: int = 1) -> None:
        """Wait until the gateway knows of `count` ready instances of a role."""
        await self.gateway.bus.directory.wait_for(lambda d: len(d.ready(role)) == count, 10)


@asynccontextmanager
async def stage(*expect: str) -> AsyncIterator[Stage]:
    async with NatsServer() as nats, AsyncExitStack() as stack:
        config = GatewayConfig(
            port=0, expect=expect, patience=PATIENCE, request_timeout=60.0, drain_timeout=1.0
        )
        gateway = await stack.enter_async_context(
            running(Gateway(config, await nats.bus("gateway")))
        )
        base = f"http://127.0.0.1:{gateway.port}"
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=base, trust_env=False, timeout=30)
        )
        yield Stage(nats, gateway, http)


@asynccontextmanager
async def chatting(here: Stage) -> AsyncIterator[None]:
    tokenizer = FakeTokenizer(None, await here.nats.bus("tokenizer"))
    async with running(tokenizer), running(FakeDecode(None, await here.nats.bus("decode"))):
        await here.known("tokenizer")
        await here.known("decode")
        yield


async def test_ready_once_all_that_was_asked_for_has_served_and_then_while_any_does() -> None:
    async with stage(*EXPECTED) as here, AsyncExitStack() as drawing:
        assert await here.ready() == 503
        async with chatting(here):
            assert await here.ready() == 503, "what draws has not served"
            assert (await here.ready(MODEL), await here.ready(BRUSH)) == (200, 503)
            await drawing.enter_async_context(
                running(FakeDiffusion(await here.nats.bus("diffusion")))
            )
            await here.known("diffusion")
            assert await here.ready() == 200
            await drawing.aclose()
            await here.known("diffusion", 0)
            assert (await here.ready(), await here.ready(BRUSH)) == (200, 503), (
                "one of two still serves"
            )
        await here.known("decode", 0)
        assert await here.ready() == 503, "nothing serves"
        assert await here.ready("unknown") == 404


async def test_models_that_start_are_listed_behind_chat() -> None:
    async with stage(f"diffusion={BRUSH}", f"decode={MODEL}", "asr=none") as here:
        assert await here.listed() == [(MODEL, "chat", "starting"), (BRUSH, "image", "starting")]
        async with running(FakeDiffusion(await here.nats.bus("diffusion"))):
            await here.known("diffusion")
            assert await here.listed() == [(MODEL, "chat", "starting"), (BRUSH, "image", "ready")]
            async with chatting(here):
                assert await here.listed() == [(MODEL, "chat", "ready"), (BRUSH, "image", "ready")]


async def test_requests_for_what_starts_wait_for_it() -> None:
    """Longer than the patience, as their deadline allows it; by an alias too."""
    async with stage(*EXPECTED) as here:
        asked = [
            asyncio.create_task(one) for one in (here.chat(), here.draw(), here.draw("gpt-image-1"))
        ]
        await asyncio.sleep(2 * PATIENCE)
        assert not any(task.done() for task in asked)
        async with chatting(here), running(FakeDiffusion(await here.nats.bus("diffusion"))):
            replies = await asyncio.gather(*asked)
        assert [reply.status_code for reply in replies] == [200, 200, 200]
        assert replies[0].json()["choices"][0]["message"]["content"] == "You said: hello"


async def test_a_client_that_leaves_frees_what_waits() -> None:
    async with stage(*EXPECTED) as here:
        asked = [asyncio.create_task(one) for one in (here.chat(), here.draw())]
        assert here.gateway.service is not None
        async with asyncio.timeout(10):
            while here.gateway.service.limits.active < len(asked):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        for task in asked:
            task.cancel()
        async with asyncio.timeout(20):
            while here.gateway.service.limits.active:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        here.gateway.check_integrity()


async def test_what_was_never_asked_for_is_refused_at_once() -> None:
    async with stage(f"decode={MODEL}") as here:
        began = time.monotonic()
        reply = await here.draw()
        assert (reply.status_code, reply.json()["error"]["param"]) == (503, "model")
        assert time.monotonic() - began < QUICK


async def test_a_lost_service_is_waited_for_as_long_as_its_start_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond the patience of the gateway: 2 s more than its 1 s."""
    monkeypatch.setattr("motet_shared.wire.bus.START", type("Measured", (), {"seconds": 4.0}))
    async with stage() as here:
        async with running(FakeDiffusion(await here.nats.bus("diffusion"))):
            await here.known("diffusion")
            assert (await here.draw()).status_code == 200
        await here.known("diffusion", 0)
        asked = asyncio.create_task(here.draw())
        await asyncio.sleep(3 * PATIENCE)
        assert not asked.done()
        async with running(FakeDiffusion(await here.nats.bus("diffusion"))):
            assert (await asked).status_code == 200


@pytest.mark.parametrize("wrong", ["pocket-chat", "decode", "decode=", "gateway=x"])
def test_what_is_expected_is_a_role_and_a_model(wrong: str) -> None:
    with pytest.raises(ConfigError) as refused:
        GatewayConfig(expect=(wrong,))
    assert refused.value.param == "expect"
