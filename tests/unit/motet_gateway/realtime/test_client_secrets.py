"""POST /v1/realtime/client_secrets: what a secret opens, how often, for whom and for how long."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from motet_gateway.tenancy import client_secrets
from motet_gateway.tenancy.client_secrets import LONGEST, SHORTEST
from support.clients.gateway_client import Socket, World, world
from support.services.fake_services import MODEL
from support.services.memory_documents import MemoryDocuments

KEY = "sesame"
PATH = "/v1/realtime/client_secrets"


class Clock:
    """Count nanoseconds that tests move on."""

    now = 0

    def __call__(self) -> int:
        return self.now


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@asynccontextmanager
async def keyed(**settings: Any) -> AsyncIterator[tuple[World, Clock]]:
    clock = Clock()
    async with world(clock=clock, api_key=KEY, **settings) as here:
        yield here, clock


async def issued(here: World, key: str = KEY, **body: Any) -> Any:
    session = {"type": "realtime", "model": MODEL, "instructions": "be brief"}
    reply = await here.post(PATH, {"session": session} | body, bearer(key))
    assert reply.status == 200, reply.json()
    return reply.json()


async def refused(socket: Socket) -> tuple[str, int | None]:
    error = (await socket.receive())["error"]
    await socket.task
    return error["code"], socket.closed


async def test_a_secret_opens_the_session_that_was_described() -> None:
    async with keyed() as (here, _):
        made = await issued(here)
        assert made["value"].startswith("ek_")
        assert abs(made["expires_at"] - time.time() - 600) < 60
        socket = Socket(here.app, query={}, headers=bearer(made["value"]))
        opened = (await socket.expect("session.created"))["session"]
        assert opened == made["session"]
        assert (opened["instructions"], opened["model"]) == ("be brief", MODEL)
        socket.say("hello")
        await socket.until("conversation.item.done")
        socket.send("response.create")
        done = (await socket.until("response.done"))[-1]["response"]
        assert done["output"][0]["content"][0]["text"] == "You said: hello"
        await socket.leave()


@asynccontextmanager
async def two_gateways(**settings: Any) -> AsyncIterator[tuple[World, World, Clock]]:
    """Two gateways that share a store; each has its own clock, of which one is far ahead."""
    store = MemoryDocuments()
    async with keyed(**settings) as (one, _), keyed(**settings) as (other, clock):
        clock.now = 10**18
        for here in (one, other):
            here.service.client_secrets.documents = store
        yield one, other, clock


async def test_it_opens_its_session_at_another_gateway() -> None:
    async with two_gateways() as (one, other, _):
        made = await issued(one)
        socket = Socket(other.app, query={}, headers=bearer(made["value"]))
        opened = (await socket.expect("session.created"))["session"]
        assert opened == made["session"]
        for here in (one, other):
            second = Socket(here.app, query={}, headers=bearer(made["value"]))
            assert await refused(second) == ("invalid_api_key", 3000)
        await socket.drop()
        query = {"session_id": made["session"]["id"]}
        again = Socket(other.app, query=query, headers=bearer(made["value"]))
        assert (await again.until("session.resumed"))[-1]["session"] == made["session"]
        await again.leave()


async def test_it_expires_at_every_gateway() -> None:
    async with two_gateways() as (one, other, clock):
        value = (await issued(one, expires_after={"seconds": SHORTEST}))["value"]
        await other.service.client_secrets.find(value)
        clock.now += SHORTEST * 10**9
        socket = Socket(other.app, headers=bearer(value))
        assert await refused(socket) == ("invalid_api_key", 3000)


async def test_it_ends_with_its_key_at_every_gateway() -> None:
    async with two_gateways() as (one, other, _):
        value = (await issued(one))["value"]
        other.service.authenticator._keys.clear()
        socket = Socket(other.app, headers=bearer(value))
        assert (await refused(socket))[0] == "invalid_api_key"


async def test_the_store_has_no_secret_and_is_asked_for_no_nonsense() -> None:
    async with two_gateways() as (one, other, _):
        value = (await issued(one))["value"]
        store = one.service.client_secrets.documents
        assert isinstance(store, MemoryDocuments)
        assert len(store.kept) == 1
        for (_, name), data in store.kept.items():
            assert value not in name
            assert value.encode() not in data
        store.away = True
        unknown = Socket(other.app, headers=bearer("ek_" + "a" * 42))
        assert (await refused(unknown))[0] == "invalid_api_key"
        unavailable = Socket(other.app, headers=bearer(value))
        assert (await refused(unavailable))[0] == "unavailable"
        store.away = False
        socket = Socket(other.app, headers=bearer(value))
        await socket.expect("session.created")
        await socket.leave()


async def test_a_page_sends_it_as_a_subprotocol() -> None:
    async with keyed() as (here, _):
        value = (await issued(here))["value"]
        offered = ["realtime", f"openai-insecure-api-key.{value}"]
        socket = Socket(here.app, subprotocols=offered, headers={"origin": "https://page.example"})
        await socket.expect("session.created")
        await socket.leave()


async def test_it_opens_one_session() -> None:
    async with keyed() as (here, _):
        value = (await issued(here))["value"]
        first = Socket(here.app, headers=bearer(value))
        await first.expect("session.created")
        second = Socket(here.app, headers=bearer(value))
        assert await refused(second) == ("invalid_api_key", 3000)
        await first.leave()
        third = Socket(here.app, headers=bearer(value))
        assert await refused(third) == ("invalid_api_key", 3000)


async def test_its_client_comes_back_to_its_session() -> None:
    async with keyed() as (here, clock):
        made = await issued(here)
        headers = bearer(made["value"])
        first = Socket(here.app, headers=headers)
        await first.expect("session.created")
        await first.drop()
        clock.now += LONGEST * 10**9
        query = {"session_id": made["session"]["id"]}
        again = Socket(here.app, query=query, headers=headers)
        resumed = (await again.until("session.resumed"))[-1]
        assert resumed["session"]["id"] == made["session"]["id"]
        other = Socket(here.app, query=query, headers=bearer((await issued(here))["value"]))
        assert (await refused(other))[0] == "session_not_found"
        await again.leave()


async def test_it_expires() -> None:
    async with keyed() as (here, clock):
        made = await issued(here, expires_after={"anchor": "created_at", "seconds": SHORTEST})
        clock.now += SHORTEST * 10**9
        socket = Socket(here.app, headers=bearer(made["value"]))
        assert await refused(socket) == ("invalid_api_key", 3000)
        await issued(here)
        assert len(here.service.client_secrets) == 1


async def test_it_opens_nothing_else() -> None:
    async with keyed() as (here, _):
        value = (await issued(here))["value"]
        for path in ("/v1/models", "/api/tags"):
            assert (await here.get(path, bearer(value)).done()).status == 401
        reply = await here.post(PATH, {}, bearer(value))
        assert reply.status == 401
        unknown = Socket(here.app, headers=bearer("ek_unknown"))
        assert (await refused(unknown))[0] == "invalid_api_key"


async def test_without_keys_a_secret_is_checked_too() -> None:
    async with world() as here:
        value = (await issued(here))["value"]
        socket = Socket(here.app, headers=bearer(value))
        assert (await socket.expect("session.created"))["session"]["instructions"] == "be brief"
        await socket.leave()
        again = Socket(here.app, headers=bearer(value))
        assert (await refused(again))[0] == "invalid_api_key"


async def test_a_tenant_has_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_secrets, "MAX_SECRETS", 2)
    async with keyed() as (here, clock):
        for _ in range(2):
            await issued(here, expires_after={"seconds": SHORTEST})
        reply = await here.post(PATH, {}, bearer(KEY))
        assert (reply.status, reply.headers["retry-after"]) == (429, str(SHORTEST))
        clock.now += SHORTEST * 10**9
        await issued(here)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"expires_after": {"seconds": SHORTEST - 1}}, "expires_after.seconds"),
        ({"expires_after": {"seconds": LONGEST + 1}}, "expires_after.seconds"),
        ({"expires_after": {"anchor": "now"}}, "expires_after.anchor"),
        ({"session": {"type": "realtime", "tools": [{"type": "mcp"}]}}, "session.tools[0].type"),
        ({"session": {"bogus": 1}}, "session.bogus"),
        ({"session": {"output_modalities": ["audio"]}}, "session.output_modalities"),
        ({"session": {"type": "transcription"}}, "session.type"),
        ({"session": {"model": "none"}}, "model"),
    ],
)
async def test_refused_by_name(body: dict[str, Any], param: str) -> None:
    async with world() as here:
        reply = await here.post(PATH, body)
        assert reply.status == (404 if param == "model" else 400)
        assert reply.json()["error"]["param"] == param


async def test_another_model_than_that_of_the_secret() -> None:
    async with world() as here:
        value = (await issued(here))["value"]
        socket = Socket(here.app, query={"model": "other"}, headers=bearer(value))
        error = (await socket.receive())["error"]
        assert error["param"] == "model"
        socket = Socket(here.app, query={"model": "gpt-realtime"}, headers=bearer(value))
        await socket.expect("session.created")
        await socket.leave()
