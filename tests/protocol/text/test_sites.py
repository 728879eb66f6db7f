"""A tenant whose work may be done at one site alone: its batches, background responses and pictures as well."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from motet_shared.testing import NatsServer, running
from support.clients.batch_files import begin, chat_line, jsonl, over
from support.services.drawing_services import BRUSH, FakeDiffusion
from support.services.fake_services import MODEL, FakeTokenizer, fake_services
from support.stages.served_gateway import Served, served_gateway
from support.stages.tenants_stage import ACME, document

JOBS = 2
PICTURE: dict[str, Any] = {"model": BRUSH, "prompt": "a circle", "seed": 5}


async def status_of(client: openai.AsyncOpenAI, job: str) -> str:
    found = await client.get(f"/images/jobs/{job}", cast_to=httpx.Response)
    return str(found.json()["status"])


@pytest.mark.long
@pytest.mark.timeout(60)
async def test_jobs_are_left_to_the_gateways_and_workers_of_the_tenants_sites(
    tmp_path: Path,
) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(document('sites = ["b"]'))
    async with NatsServer(store=tmp_path / "jetstream") as nats, AsyncExitStack() as stack:
        tokenizers: dict[str, FakeTokenizer] = {}
        brushes: dict[str, FakeDiffusion] = {}
        gateways = {}
        for site in ("a", "b"):
            buses = await nats.bus("tokenizer", site), await nats.bus("decode", site)
            for bus in buses:
                stack.push_async_callback(bus.close)
            tokenizers[site] = await stack.enter_async_context(fake_services(*buses))
            brush = FakeDiffusion(await nats.bus("diffusion", site))
            brushes[site] = await stack.enter_async_context(running(brush))
        for site in ("a", "b"):
            gateways[site] = await stack.enter_async_context(
                served_gateway(nats, tenants_file=tenants, site=site)
            )
        for gateway in gateways.values():
            await gateway.bus.directory.wait_for(lambda d: len(d.ready("diffusion")) == 2, 10)
        elsewhere = await stack.enter_async_context(Served(gateways["a"]).client(ACME))
        with pytest.raises(openai.PermissionDeniedError, match="this gateway is at 'a'"):
            await elsewhere.models.list()
        client = await stack.enter_async_context(Served(gateways["b"]).client(ACME))

        jobs = [
            await client.post("/images/jobs", body=PICTURE, cast_to=httpx.Response)
            for _ in range(JOBS)
        ]
        lines = [chat_line(str(number), f"line {number}") for number in range(4)]
        batch = await begin(client, jsonl(lines))
        response = await client.responses.create(model=MODEL, input="later", background=True)
        assert (await over(client, batch.id)).status == "completed"
        async with asyncio.timeout(40):
            while response.status != "completed":
                await asyncio.sleep(0.1)
                response = await client.responses.retrieve(response.id)
            for job in jobs:
                while (status := await status_of(client, job.json()["id"])) != "done":
                    assert status in ("queued", "running")
                    await asyncio.sleep(0.1)
        assert (len(tokenizers["a"].requests), len(tokenizers["b"].requests)) == (0, 5)
        assert brushes["a"].bus.calls.requests == 0
        assert brushes["b"].bus.calls.requests == JOBS
