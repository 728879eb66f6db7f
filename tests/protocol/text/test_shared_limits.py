"""Limits and use of tenants over two gateways, over a restart, and while NATS is away."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from motet_gateway.service import Gateway
from motet_gateway.storage.counts import Count, SharedCounts
from motet_gateway.storage.jetstream import connect
from motet_gateway.tenancy.shared_bucket import LEASES
from motet_shared.testing import NatsServer
from support.services.fake_services import MODEL, fake_services
from support.stages.served_gateway import served_gateway
from support.stages.tenants_stage import bearer, document

pytestmark = pytest.mark.timeout(60)
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "one two three"}],
    "max_tokens": 10,
}


class Stack:
    """A nats-server with JetStream, on which gateways begin and end."""

    def __init__(self, nats: NatsServer, tenants: Path):
        self.nats, self._tenants = nats, tenants

    @asynccontextmanager
    async def gateway(self) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
        async with (
            served_gateway(self.nats, tenants_file=self._tenants) as gateway,
            httpx.AsyncClient(
                trust_env=False,
                base_url=f"http://127.0.0.1:{gateway.port}/v1",
                headers=bearer(),
                timeout=20,
            ) as http,
        ):
            await gateway.bus.directory.wait_for(lambda d: d.ready("tokenizer"), 10)
            yield gateway, http

    async def count(self, gateway: Gateway, kind: str) -> Count:
        client = await connect(gateway.bus)
        assert client is not None
        counts = await SharedCounts.open(client)
        return await counts.change(f"acme.{kind}", lambda count: count)


def used_tokens(gateway: Gateway) -> float:
    """Return the tokens that a gateway's metrics count for all gateways."""
    assert gateway.service is not None
    metrics = gateway.service.metrics.registry.render().decode()
    found = re.search(r'motet_tenant_used{.*kind="tokens".*tenant="acme"} (\S+)', metrics)
    assert found is not None
    return float(found[1])


@asynccontextmanager
async def stack(tmp_path: Path, limits: str) -> AsyncIterator[Stack]:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(document(limits))
    async with NatsServer(store=tmp_path / "jetstream") as nats, AsyncExitStack() as ends:
        buses = await nats.bus("tokenizer"), await nats.bus("decode")
        for bus in buses:
            ends.push_async_callback(bus.close)
        await ends.enter_async_context(fake_services(*buses))
        yield Stack(nats, tenants)


async def test_a_small_limit_is_exact_over_gateways_and_over_restarts(tmp_path: Path) -> None:
    async with stack(tmp_path, "requests_per_minute = 6\ntokens_per_minute = 1000") as here:
        async with here.gateway() as (first, http), here.gateway() as (second, other):
            replies = [
                await client.post("/chat/completions", json=CHAT)
                for _ in range(5)
                for client in (http, other)
            ]
            assert [reply.status_code for reply in replies] == [200] * 6 + [429] * 4
            assert replies[-1].json()["error"]["code"] == "rate_limit_exceeded"
            assert replies[5].headers["x-ratelimit-remaining-requests"] == "0"
            used = sum(reply.json()["usage"]["total_tokens"] for reply in replies[:6])
            await asyncio.sleep(2.2)  # both have reported
            assert (await here.count(first, "requests")).used == 6
            tokens = await here.count(first, "tokens")
            assert tokens.used == used
            assert max(map(used_tokens, (first, second))) == used
        async with here.gateway() as (again, http):
            refused = await http.post("/chat/completions", json=CHAT)
            assert refused.status_code == 429, "a restart forgets nothing"
            tokens = await here.count(again, "tokens")
            passed = time.time() - tokens.at
            assert tokens.taken - passed * 1000 / 60 <= used, "leases were given back"


async def test_a_large_limit_is_exact_but_for_a_lease_of_each_gateway(tmp_path: Path) -> None:
    limit, gateways = 960, 2
    async with (
        stack(tmp_path, f"requests_per_minute = {limit}") as here,
        here.gateway() as (_, http),
        here.gateway() as (_, other),
    ):
        began = time.monotonic()

        async def admitted(client: httpx.AsyncClient) -> int:
            count = 0
            while (await client.get("/models")).status_code == 200:
                count += 1
            return count

        total = sum(await asyncio.gather(*[admitted(one) for one in (http, other) * 4]))
        refilled = (time.monotonic() - began) * limit / 60
        error = gateways * limit / LEASES
        print(f"{total} of {limit} + {refilled:.0f} refilled; the error may be {error:g}")
        assert limit - error <= total <= limit + refilled + error


async def test_while_nats_is_away_what_was_leased_is_served(tmp_path: Path) -> None:
    limit = 960
    async with (
        stack(tmp_path, f"requests_per_minute = {limit}") as here,
        here.gateway() as (_, http),
    ):
        assert (await http.get("/models")).status_code == 200
        await here.nats.kill()
        statuses = [(await http.get("/models")).status_code for _ in range(limit // LEASES + 2)]
        assert statuses == [200] * (limit // LEASES) + [429] * 2
        await here.nats.start()
        async with asyncio.timeout(20):
            while (await http.get("/models")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
