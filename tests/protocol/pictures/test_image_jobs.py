"""Jobs and URLs: what is taken in is drawn, once, whatever restarts; the official client over a real JetStream."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from motet_diffusion.service import Diffusion
from motet_shared.testing import NatsServer, free_port, running
from support.checkpoints import diffusion_checkpoints
from support.checkpoints.diffusion_checkpoints import SIZE
from support.running.fork_server import ForkServer
from support.services.drawing_services import BRUSH, FakeDiffusion
from support.stages.diffusion_stage import LOADED, MODEL, config, flags, pixels
from support.stages.served_gateway import Served, served_gateway

BODY: dict[str, Any] = {"model": MODEL, "prompt": "two red circles", "seed": 5, "steps": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return diffusion_checkpoints.stable_diffusion(tmp_path_factory.mktemp("sd") / "model", "euler")


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(store=tmp_path / "jetstream") as server:
        yield server


async def post(client: openai.AsyncOpenAI, **fields: Any) -> dict[str, Any]:
    reply = await client.post("/images/jobs", body={**BODY, **fields}, cast_to=httpx.Response)
    assert reply.status_code == 202
    return reply.json()


async def status(client: openai.AsyncOpenAI, job: str) -> dict[str, Any]:
    return (await client.get(f"/images/jobs/{job}", cast_to=httpx.Response)).json()


async def cancel(client: openai.AsyncOpenAI, job: str) -> dict[str, Any]:
    return (await client.delete(f"/images/jobs/{job}", cast_to=httpx.Response)).json()


async def done(client: openai.AsyncOpenAI, job: str, seconds: float = 60) -> dict[str, Any]:
    """The job, once it is over."""
    async with asyncio.timeout(seconds):
        while (found := await status(client, job))["status"] not in ("done", "failed", "cancelled"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return found


async def fetched(url: str) -> bytes:
    async with httpx.AsyncClient(trust_env=False) as http:
        return (await http.get(url)).raise_for_status().content


async def test_urls_and_jobs(nats: NatsServer, folder: Path) -> None:
    async with (
        served_gateway(nats) as gateway,
        running(Diffusion(config(folder), await nats.bus("diffusion"))) as painter,
        Served(gateway).client() as client,
    ):
        assert isinstance(painter, Diffusion)
        await gateway.bus.directory.wait_for(lambda d: d.ready("diffusion"), 10)
        found = await client.images.generate(
            model=MODEL,
            prompt=BODY["prompt"],
            response_format="url",
            n=2,
            extra_body={"seed": 5, "steps": 6},
        )
        assert found.data is not None
        first, second = [await fetched(image.url or "") for image in found.data]
        assert first != second
        assert pixels(first).shape == (SIZE, SIZE, 3)

        job = await post(client, id="a-job", n=2)
        assert (job["id"], job["object"]) == ("a-job", "image.job")
        ended = await done(client, "a-job")
        assert (ended["status"], ended["step"], ended["steps"], ended["error"]) == (
            "done",
            12,
            12,
            None,
        )
        assert abs(pixels(await fetched(ended["data"][0]["url"])) - pixels(first)).max() <= 1
        made = painter.thread.engine.pictures
        assert (await post(client, id="a-job", n=2))["status"] == "done"  # for the second time
        await asyncio.sleep(0.3)
        assert painter.thread.engine.pictures == made

        with pytest.raises(openai.BadRequestError, match="a-job"):
            await post(client, id="a-job", prompt="blue")
        with pytest.raises(openai.NotFoundError, match="job 'nobody'"):
            await status(client, "nobody")
        failed = await done(client, (await post(client, size="17x16"))["id"])
        assert failed["status"] == "failed"
        assert "multiples of 2" in failed["error"]["message"]
        async with httpx.AsyncClient(trust_env=False) as http:
            gone = await http.get(f"{Served(gateway).url}/images/nothing.png")
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")


async def test_jobs_are_cancelled(nats: NatsServer, folder: Path) -> None:
    async with (
        served_gateway(nats, jobs=1) as gateway,
        running(Diffusion(config(folder), await nats.bus("diffusion"))) as painter,
        Served(gateway).client() as client,
    ):
        assert isinstance(painter, Diffusion)
        engine = painter.thread.engine
        await gateway.bus.directory.wait_for(lambda d: d.ready("diffusion"), 10)
        await post(client, id="long", steps=2000)
        for name in ("one", "two", "three"):
            await post(client, id=name)
        async with asyncio.timeout(30):
            while engine.passes < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        # One that waits is gone, and nobody waits for it any more.
        assert (await status(client, "three"))["position"] == 2
        for _ in range(2):
            found = await cancel(client, "one")
            assert (found["status"], found["position"], found["data"]) == ("cancelled", None, [])
        assert [(await status(client, name))["position"] for name in ("two", "three")] == [0, 1]
        # One that is drawn stops: the next one has its place.
        assert engine.pictures == 0
        assert (await cancel(client, "long"))["status"] == "cancelled"
        for name in ("two", "three"):
            assert (await done(client, name))["status"] == "done"
        assert engine.passes < 1500
        assert engine.pictures == 2
        assert [(await status(client, name))["status"] for name in ("long", "one")] == [
            "cancelled"
        ] * 2
        assert (await cancel(client, "long"))["status"] == "cancelled"
        # What is over stays as it is, and a cancelled one is not begun again.
        assert (await cancel(client, "two"))["status"] == "done"
        assert (await post(client, id="one"))["status"] == "cancelled"
        await asyncio.sleep(0.3)
        assert engine.pictures == 2
        with pytest.raises(openai.NotFoundError, match="job 'nobody'"):
            await cancel(client, "nobody")
        painter.check_integrity()


async def test_a_job_is_queued_once_and_waits_for_its_model(
    nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served_gateway(nats, jobs=0) as gateway, Served(gateway).client() as client:
        assert gateway.service is not None
        jobs = gateway.service.jobs
        assert jobs is not None
        push, pushed = jobs._store.queue.push, []

        async def counted(job: str) -> int:
            pushed.append(job)
            return await push(job)

        monkeypatch.setattr(jobs._store.queue, "push", counted)
        async with running(FakeDiffusion(await nats.bus("diffusion"))):
            await gateway.bus.directory.wait_for(lambda d: d.ready("diffusion"), 10)
            for _ in range(2):
                assert (await post(client, id="one", model=BRUSH))["status"] == "queued"
            assert pushed == ["one"]
            with pytest.raises(openai.NotFoundError):
                await post(client, id="two", model="other")
        await gateway.bus.directory.wait_for(lambda d: not d.ready("diffusion"), 10)
        assert not await jobs._run("one", 9), "however often, while the model is away"
        assert (await status(client, "one"))["status"] != "failed"
        monkeypatch.setattr(jobs, "_deadline", 0.0)
        assert await jobs._run("one", 9)
        assert (await status(client, "one"))["status"] == "failed"


async def test_without_a_store_it_says_so(folder: Path) -> None:
    async with (
        NatsServer() as nats,
        served_gateway(nats) as gateway,
        Served(gateway).client() as client,
    ):
        with pytest.raises(openai.BadRequestError, match="response_format"):
            await client.images.generate(model=MODEL, prompt="x", response_format="url")
        for asked in (post(client), cancel(client, "x")):
            with pytest.raises(openai.APIStatusError, match="--store"):
                await asked


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_jobs_survive_the_death_of_every_process(nats: NatsServer, folder: Path) -> None:
    """Gateway, worker and NATS are killed while one job is drawn and others wait; all are done in the end."""
    port, names = free_port(), [f"short-{number}" for number in range(3)]
    async with ForkServer(*LOADED, "motet_gateway.service") as forks, client_of(port) as client:
        processes = await started(forks, nats, folder, port)
        await serves(client)
        await post(client, id="long", steps=150)
        for seed, name in enumerate(names):
            await post(client, id=name, seed=seed)
        async with asyncio.timeout(60):
            while (found := await status(client, "long"))["step"] < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert found["status"] == "running"
        assert [(await status(client, name))["position"] for name in names] == [0, 1, 2]
        for process in processes:
            os.kill(process, signal.SIGKILL)
        await nats.kill()
        await nats.start()
        await started(forks, nats, folder, port)
        await serves(client)
        for name in ("long", *names):
            ended = await done(client, name, 180)
            assert ended["status"] == "done", ended
            assert pixels(await fetched(ended["data"][0]["url"])).shape == (SIZE, SIZE, 3)


def client_of(port: int) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, http_client=http
    )


async def started(forks: ForkServer, nats: NatsServer, folder: Path, port: int) -> list[int]:
    """A gateway that draws one job at a time, and a worker: their process ids."""
    return [
        await forks.start(
            nats, "motet_gateway", "--port", str(port), "--jobs", "1", "--job-patience", "2"
        ),
        await forks.start(nats, "motet_diffusion", *flags(folder)),
    ]


async def serves(client: openai.AsyncOpenAI) -> None:
    """Wait until the worker is known to the gateway."""
    async with asyncio.timeout(180):
        while True:
            with contextlib.suppress(openai.APIError):
                if MODEL in [model.id for model in (await client.models.list()).data]:
                    return
            await asyncio.sleep(0.2)
