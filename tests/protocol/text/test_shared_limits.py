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
from motet_gateway.storage.counts import LEASES, Count, HeldSlots, SharedCounts
from motet_gateway.storage.jetstream import connect
from motet_gateway.tenancy import slots
from motet_gateway.tenancy.slots import SlotLease, Slots
from motet_shared.testing import NatsServer
from support.services.fake_services import MODEL, FakeTokenizer, fake_services
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

    def __init__(self, nats: NatsServer, tenants: Path, tokenizer: FakeTokenizer):
        self.nats, self._tenants, self.tokenizer = nats, tenants, tokenizer

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

    async def counts(self, gateway: Gateway) -> SharedCounts:
        client = await connect(gateway.bus)
        assert client is not None
        return await SharedCounts.open(client)

    async def count(self, gateway: Gateway, kind: str) -> Count:
        counts = await self.counts(gateway)
        return await counts.change(f"acme.{kind}", Count, lambda count: count)


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
        tokenizer = await ends.enter_async_context(fake_services(*buses))
        yield Stack(nats, tenants, tokenizer)


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


# ------------------------------------------------------------------------------------------- at a time
async def test_replies_at_a_time_are_exact_over_gateways(tmp_path: Path) -> None:
    async with stack(tmp_path, "concurrent_streams = 3") as here:
        here.tokenizer.pace = 60
        async with (
            here.gateway() as (first, http),
            here.gateway() as (_, other),
            AsyncExitStack() as running,
        ):
            statuses = []
            for client in (http, other) * 3:
                asked = client.stream("POST", "/chat/completions", json=CHAT | {"stream": True})
                statuses.append((await running.enter_async_context(asked)).status_code)
            assert statuses == [200] * 3 + [429] * 3
            counts = await here.counts(first)
            held = await counts.change("acme.streams", HeldSlots, lambda held: held)
            assert sorted(number for number, _ in held.by.values()) == [1, 2]
            await running.aclose()
            here.tokenizer.pace = 0
            async with asyncio.timeout(10):  # until the second gateway has given back what it had
                for client in (http, other):
                    while (await client.post("/chat/completions", json=CHAT | {"n": 3})).is_error:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
        async with here.gateway() as (again, _):
            counts = await here.counts(again)
            held = await counts.change("acme.streams", HeldSlots, lambda held: held)
            assert held.by == {}, "a gateway that ends gives back what it has leased"


async def test_slots_of_a_gateway_that_is_silent_are_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "EXPIRY", 2.0)
    monkeypatch.setattr(slots, "RENEW", 0.2)
    async with stack(tmp_path, "") as here, here.gateway() as (gateway, _):
        counts = await here.counts(gateway)
        alive, dead = Slots(4), Slots(4)
        for name, one in (("alive", alive), ("dead", dead)):
            one.lease = SlotLease(counts, "acme.sockets", name, one)
            await one.fetch(2)
            assert one.has(2)
            one.open += 2
        await alive.fetch(1)
        assert not alive.has(1)
        async with asyncio.timeout(20):
            while not alive.has(1):
                await asyncio.sleep(0.1)
                assert alive.lease is not None
                await alive.lease.report()
                await alive.fetch(1)
        await dead.fetch(1)  # it was only slow: what is open there counts again
        assert not dead.has(1)
        assert alive.free <= 2


async def test_while_nats_is_away_no_more_is_open_than_was_leased(tmp_path: Path) -> None:
    async with stack(tmp_path, "") as here, here.gateway() as (gateway, _):
        mine = Slots(2 * LEASES)
        mine.lease = SlotLease(await here.counts(gateway), "acme.streams", "mine", mine)
        await mine.fetch(1)
        mine.open += 1
        await here.nats.kill()
        for more in (2, 1):
            await mine.fetch(3)
            assert (mine.has(more), mine.has(more + 1)) == (True, False)
            mine.open += 1
        await here.nats.start()
        async with asyncio.timeout(20):
            while not mine.has(LEASES):
                await asyncio.sleep(0.1)
                await mine.fetch(LEASES)
