"""A batch goes on behind the death of its gateway and of NATS; leases and logs admit one gateway."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from motet_gateway.batches.queue import BatchQueue, QueuedBatch
from motet_gateway.batches.results import LeaseLost, ResultFile
from motet_gateway.files.store import FileStore
from motet_gateway.storage.documents import JetStreamDocuments
from motet_gateway.storage.jetstream import connect
from motet_gateway.storage.quota import Stored
from motet_shared.testing import NatsServer, free_port
from support.clients.batch_files import begin, chat_line, jsonl, lines_of, over, text_of
from support.running.fork_server import ForkServer
from support.services.fake_services import MODEL, FakeTokenizer, fake_services

LINES = 60
FLAGS = ("--job-patience", "2", "--batch-lines", "4")


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(store=tmp_path / "jetstream") as server:
        yield server


@asynccontextmanager
async def nats_client(nats: NatsServer) -> AsyncIterator[Any]:
    bus = await nats.bus("gateway")
    try:
        yield await connect(bus)
    finally:
        await bus.close()


@asynccontextmanager
async def model(nats: NatsServer) -> AsyncIterator[FakeTokenizer]:
    buses = await nats.bus("tokenizer"), await nats.bus("decode")
    async with fake_services(*buses) as tokenizer:
        yield tokenizer
    for bus in buses:
        await bus.close()


def client_of(port: int) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, http_client=http
    )


async def serves(client: openai.AsyncOpenAI) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(openai.APIError):
                if MODEL in [one.id for one in (await client.models.list()).data]:
                    return
            await asyncio.sleep(0.1)


def asked(tokenizer: FakeTokenizer) -> Counter[str]:
    """Return how often each line was asked of the model."""
    return Counter(str(request.messages[-1]["content"]) for request in tokenizer.requests)


@pytest.mark.long
@pytest.mark.timeout(180)
async def test_each_line_is_answered_once_whatever_is_killed(nats: NatsServer) -> None:
    """The gateway and NATS are killed within a batch; two gateways compete for the rest."""
    ports = [free_port() for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        forks = await stack.enter_async_context(ForkServer("motet_gateway.service"))
        first, second, third = [await stack.enter_async_context(client_of(port)) for port in ports]
        async with model(nats) as tokenizer:
            tokenizer.pace = 0.05
            gateway = await forks.start(nats, "motet_gateway", "--port", str(ports[0]), *FLAGS)
            await serves(first)
            made = await begin(first, jsonl(chat_line(f"{n}", f"t{n}") for n in range(LINES)))
            async with asyncio.timeout(60):
                while len(tokenizer.requests) < LINES // 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            os.kill(gateway, signal.SIGKILL)
            before = asked(tokenizer)
        await nats.kill()
        await nats.start()
        async with model(nats) as tokenizer:
            tokenizer.pace = 0.05
            for port in ports[1:]:
                await forks.start(nats, "motet_gateway", "--port", str(port), *FLAGS)
            await serves(second)
            await serves(third)
            done = await over(third, made.id)
            after = asked(tokenizer)
        assert done.status == "completed"
        assert done.request_counts is not None
        assert (done.request_counts.completed, done.request_counts.failed) == (LINES, 0)
        found = await lines_of(second, done.output_file_id)
        assert len(found) == LINES
        assert {line["custom_id"]: text_of(line) for line in found} == {
            f"{n}": f"You said: t{n}" for n in range(LINES)
        }
        assert set(after.values()) == {1}, "two gateways ran the batch at once"
        assert set(before) | set(after) == {f"t{n}" for n in range(LINES)}
        assert len(after) < LINES, "what was stored is not computed again"


async def test_a_lease_is_held_by_one_until_it_expires(nats: NatsServer) -> None:
    batch = QueuedBatch("acme", "batch_1")
    async with nats_client(nats) as one, nats_client(nats) as other:
        mine = await BatchQueue.open(one, 60, 1.0)
        theirs = await BatchQueue.open(other, 60, 1.0)
        await mine.add(batch)
        await mine.add(QueuedBatch("", "batch_0"))
        lease = await mine.take(batch)
        assert lease is not None
        assert await theirs.take(batch) is None
        assert await theirs.waiting() == [QueuedBatch("", "batch_0")]
        # It is renewed beyond its time.
        renewing = asyncio.create_task(lease.lost())
        await asyncio.sleep(1.5)
        assert not renewing.done()
        assert await theirs.take(batch) is None
        renewing.cancel()
        async with asyncio.timeout(10):
            while (taken := await theirs.take(batch)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert not lease.is_held, "it stopped before another one could take it"
        await asyncio.wait_for(lease.lost(), 1)
        await lease.release()  # of no effect
        assert await mine.take(batch) is None
        await taken.release()
        assert await mine.take(batch) is not None
        await mine.remove(batch)
        assert await theirs.waiting() == [QueuedBatch("", "batch_0")]


async def test_batches_of_tenants_take_turns(nats: NatsServer) -> None:
    async with nats_client(nats) as client:
        queue = await BatchQueue.open(client, 60, 5.0)
        for name in ("a.batch_1", "a.batch_2", "a.batch_3", "b.batch_5", "-.batch_4"):
            await queue.add(QueuedBatch.of(name))
        order = [batch.key for batch in await queue.waiting()]
        assert order == ["a.batch_1", "-.batch_4", "b.batch_5", "a.batch_2", "a.batch_3"]
        assert await queue.take(QueuedBatch("a", "batch_1")) is not None
        order = [batch.key for batch in await queue.waiting()]
        assert order == ["-.batch_4", "b.batch_5", "a.batch_2", "a.batch_3"]


async def test_of_two_that_append_one_is_refused(nats: NatsServer) -> None:
    async with nats_client(nats) as client:
        stored = Stored(lambda owner: None)
        files = FileStore(JetStreamDocuments(client, "motet_files", 60), stored, 60)
        name = "file-" + "0" * 24
        one, other = ResultFile(files, "acme", name), ResultFile(files, "acme", name)
        one.add(b'{"custom_id":"a"}')
        large = b'{"custom_id":"b","x":"' + b"x" * 400_000 + b'"}'
        one.add(large)
        await one.flush()
        other.add(b'{"custom_id":"a","by":"other"}')
        with pytest.raises(LeaseLost):
            await other.flush()
        again = ResultFile(files, "acme", name)
        assert await again.answered() == ["a", "b"]
        again.add(b'{"custom_id":"c"}')
        await again.flush()
        one.add(large)
        with pytest.raises(LeaseLost):
            await one.flush()
        assert await again.close("out.jsonl", 0)
        file = await files.get("acme", name)
        data = b"".join([part async for part in files.read("acme", file)])
        assert data == b'{"custom_id":"a"}\n' + large + b'\n{"custom_id":"c"}\n'
        assert file.bytes == len(data)
