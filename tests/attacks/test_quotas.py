"""A tenant that fills the store with pictures and jobs is refused at its bound, others are not, also after restarts."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from motet_gateway.http.problems import Problem, QuotaExceeded
from motet_gateway.images.store import ImageStore
from motet_gateway.service import Gateway
from motet_gateway.storage.quota import STALE_AFTER, Entry, Stored
from motet_shared.errors import ConfigError
from motet_shared.tenants import STORED_BYTES, TenantLimits, parse_tenants
from motet_shared.testing import NatsServer
from support.stages.served_gateway import served_gateway
from support.stages.tenants_stage import OTHER, bearer, document

LIMIT = 100_000
BODY: dict[str, Any] = {"model": "brush", "prompt": "a circle", "seed": 5}


@asynccontextmanager
async def serving(
    nats: NatsServer, tmp_path: Path, **settings: Any
) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    """A gateway that draws no jobs."""
    file = tmp_path / "tenants.toml"
    file.write_text(document(f"stored_bytes = {LIMIT}"))
    async with (
        served_gateway(nats, tenants_file=file, jobs=0, **settings) as gateway,
        httpx.AsyncClient(
            trust_env=False, base_url=f"http://127.0.0.1:{gateway.port}/v1/images", timeout=30
        ) as http,
    ):
        yield gateway, http


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(store=tmp_path / "jetstream") as server:
        yield server


def keep_of(gateway: Gateway) -> ImageStore:
    assert gateway.service is not None
    assert gateway.service.store is not None
    return gateway.service.store


def check_refused(answer: httpx.Response) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (
        429,
        "insufficient_quota",
        "insufficient_quota",
    )


async def test_pictures_are_bounded_for_each_tenant(nats: NatsServer, tmp_path: Path) -> None:
    async with serving(nats, tmp_path) as (gateway, _):
        keep = keep_of(gateway)
        first = await keep.put_image(bytes(60_000), "png", "acme")
        with pytest.raises(QuotaExceeded) as refusal:
            await keep.put_image(bytes(60_000), "png", "acme")
        problem = Problem.of(refusal.value)
        assert (problem.status, problem.code, problem.param) == (
            429,
            "insufficient_quota",
            "response_format",
        )
        await keep.put_image(bytes(60_000), "png", "other")
        await keep.put_image(bytes(60_000), "png")
        assert keep.stored.used("acme") == 60_000
        assert len(await keep.image(first)) == 60_000
    async with serving(nats, tmp_path) as (gateway, _):  # a restart forgets nothing
        keep = keep_of(gateway)
        with pytest.raises(QuotaExceeded):
            await keep.put_image(bytes(60_000), "png", "acme")
        assert keep.stored.used("other") == 60_000
        await keep._images.delete(first)
        await asyncio.sleep(1.1)  # READ_EVERY
        await keep.put_image(bytes(60_000), "png", "acme")


async def test_pictures_that_expired_leave_room(nats: NatsServer, tmp_path: Path) -> None:
    async with serving(nats, tmp_path, picture_ttl=1.0) as (gateway, _):
        keep = keep_of(gateway)
        await keep.put_image(bytes(90_000), "png", "acme")
        with pytest.raises(QuotaExceeded):
            await keep.put_image(bytes(90_000), "png", "acme")
        await asyncio.sleep(1.5)
        await keep.put_image(bytes(90_000), "png", "acme")


async def test_many_at_a_time_do_not_pass_the_bound(nats: NatsServer, tmp_path: Path) -> None:
    async with serving(nats, tmp_path) as (gateway, _):
        keep = keep_of(gateway)
        puts = (keep.put_image(bytes(30_000), "png", "acme") for _ in range(10))
        found = await asyncio.gather(*puts, return_exceptions=True)
        assert sum(isinstance(one, str) for one in found) == 3
        assert sum(isinstance(one, QuotaExceeded) for one in found) == 7


async def test_jobs_count_and_are_refused_at_the_bound(nats: NatsServer, tmp_path: Path) -> None:
    async with serving(nats, tmp_path) as (_, http):
        long = BODY | {"prompt": secrets.token_hex(15_000)}  # 30 kB
        for number in range(3):
            answer = await http.post("/jobs", json=long | {"id": f"a{number}"}, headers=bearer())
            assert answer.status_code == 202
        check_refused(await http.post("/jobs", json=long | {"id": "a3"}, headers=bearer()))
        assert (await http.get("/jobs/a3", headers=bearer())).status_code == 404
        again = await http.post("/jobs", json=long | {"id": "a0"}, headers=bearer())
        assert again.status_code == 202, "one that is here is told again"
        assert (await http.post("/jobs", json=long, headers=bearer(OTHER))).status_code == 202
    async with serving(nats, tmp_path) as (_, http):
        check_refused(await http.post("/jobs", json=long | {"id": "a4"}, headers=bearer()))


async def test_a_reading_is_not_repeated_for_each_refusal() -> None:
    now, readings = [0.0], []

    async def read() -> AsyncIterator[Entry]:
        readings.append(now[0])
        yield Entry("a", "acme", 10, 50.0)

    stored = Stored(lambda owner: 15, lambda: now[0])
    stored.sources.append(read)
    for _ in range(5):
        with pytest.raises(QuotaExceeded):
            await stored.check("acme", 10)
    assert len(readings) == 1
    await stored.check("other", 15)
    now[0] = STALE_AFTER + 1
    with pytest.raises(QuotaExceeded):
        await stored.check("acme", 10)
    assert len(readings) == 2
    now[0] = 51.0
    assert stored.used("acme") == 0


def test_the_bound_is_a_setting_with_a_default() -> None:
    assert TenantLimits().stored_bytes == STORED_BYTES
    assert parse_tenants("[tenants.acme]\nstored_bytes = 0\n", "t").limits["acme"].stored_bytes == 0
    for wrong in ("-1", "1.5", '"1 GiB"'):
        with pytest.raises(ConfigError, match="stored_bytes"):
            parse_tenants(f"[tenants.acme]\nstored_bytes = {wrong}\n", "t")
