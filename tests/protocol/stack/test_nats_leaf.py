"""A host with a NATS server of its own, a leaf of the stack's: calls both ways, what is stored, and the leaf's loss."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path

import pytest

from motet_gateway.config import GatewayConfig
from motet_gateway.service import Gateway
from motet_gateway.storage.counts import Count, SharedCounts
from motet_gateway.storage.documents import SMALL, JetStreamDocuments
from motet_gateway.storage.jetstream import connect
from motet_gateway.storage.work_queue import WorkQueue
from motet_shared.errors import StreamBroken
from motet_shared.messages import Echo, Text
from motet_shared.testing import NatsServer, free_port, running
from motet_shared.wire.bus import Bus
from support.peers.nats_servers import Credentials
from support.peers.tcp_proxy import TcpProxy
from support.services.echo_worker import EchoWorker
from support.services.stream_world import ids

TOKENS = 200
PAUSE = 5.0  # seconds, on a machine that is busy with other things


class Leafed:
    """A hub and a leaf, whose connection is `line`."""

    def __init__(self, made: Credentials, hub: NatsServer, leaf: NatsServer, line: TcpProxy):
        self.made, self.hub, self.leaf, self.line = made, hub, leaf, line

    @asynccontextmanager
    async def worker(self, server: NatsServer) -> AsyncIterator[EchoWorker]:
        async with self.made.bus("tokenizer", server) as bus:
            worker = EchoWorker(self.made.config("tokenizer", server), bus)
            await worker.start()
            try:
                yield worker
            finally:
                await worker.close()


@pytest.fixture
async def leafed(tmp_path: Path) -> AsyncIterator[Leafed]:
    port = free_port()
    made = Credentials(tmp_path, [free_port()], [port])
    hub = made.hub(tmp_path / "store", port)
    async with hub, TcpProxy(port, delay=0.01) as line, made.leaf("leaf", line.port) as leaf:
        yield Leafed(made, hub, leaf, line)


async def seen(bus: Bus, count: int = 1) -> None:
    await bus.directory.wait_for(lambda d: len(d.ready("tokenizer")) == count, 20)


async def test_calls_cross_the_leaf_both_ways(leafed: Leafed) -> None:
    for caller, worker in ((leafed.hub, leafed.leaf), (leafed.leaf, leafed.hub)):
        async with leafed.worker(worker), leafed.made.bus("gateway", caller) as bus:
            await seen(bus)
            streams = [bus.open("tokenizer", Echo(count=100, text="x")) for _ in range(16)]
            assert await asyncio.gather(*map(ids, streams)) == [list(range(100))] * 16


async def test_what_is_stored_lies_at_the_hub(leafed: Leafed) -> None:
    large = os.urandom(3 * SMALL)
    async with (
        leafed.made.bus("gateway", leafed.leaf) as far,
        leafed.made.bus("gateway", leafed.hub) as near,
    ):
        async with asyncio.timeout(20):
            while await connect(far) is None:  # noqa: ASYNC110  (the leaf connects to the hub)
                await asyncio.sleep(0.1)
        clients = [await connect(far), await connect(near)]
        assert all(clients), "JetStream answers at both"
        documents = [
            JetStreamDocuments(client, "motet_responses", 600.0) for client in clients if client
        ]
        await documents[0].put("acme", "far", large)
        await documents[1].put("acme", "near", b"small")
        assert await documents[1].get("acme", "far") == large
        assert await documents[0].get("acme", "near") == b"small"

        counts = [await SharedCounts.open(client) for client in clients if client]

        def more(count: Count) -> float:
            count.used += 1
            return count.used

        await asyncio.gather(*(one.change("acme", Count, more) for one in counts * 4))
        assert [await one.change("acme", Count, more) for one in counts] == [9.0, 10.0]

        far_jobs, near_jobs = [
            await WorkQueue.open(
                client, "motet_jobs", "motet.v2.jobs.x", consumer="c", ttl=60, patience=5
            )
            for client in clients
            if client
        ]
        places = [await far_jobs.push("one"), await near_jobs.push("two")]
        assert [await far_jobs.position(seq) for seq in places] == [0, 1]
        done: list[str] = []

        async def run(job: str, attempt: int) -> bool:
            done.append(f"{job} {attempt}")
            return True

        working = asyncio.create_task(far_jobs.work(run))
        async with asyncio.timeout(20):
            while len(done) < 2 or await pending_jobs(near):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        working.cancel()
        assert done == ["one 1", "two 1"]


async def test_a_gateway_that_starts_before_its_leaf_is_connected_stores_later(
    tmp_path: Path,
) -> None:
    port = free_port()
    made = Credentials(tmp_path, [free_port()], [port])
    async with made.leaf("leaf", port) as leaf, made.bus("gateway", leaf) as bus:
        gateway = Gateway(GatewayConfig(port=0, drain_timeout=1.0), bus)
        async with running(gateway):
            service = gateway.service
            assert service is not None
            assert service.responses is None
            async with made.hub(tmp_path / "store", port):
                async with asyncio.timeout(30):
                    while service.voices is None:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                assert await service.voices.all("acme") == []
                assert service.accounts is not None
                await gateway.close()


async def pending_jobs(bus: Bus) -> int:
    """Return the number of jobs that are not acknowledged."""
    js = bus.frames.client.jetstream(timeout=5)  # type: ignore[attr-defined]
    return int((await js.stream_info("motet_jobs")).state.messages)


@asynccontextmanager
async def lost(leafed: Leafed, how: str) -> AsyncIterator[None]:
    """Take the leaf from the hub in the block."""
    with leafed.line.cut() if how == "cut" else nullcontext():
        if how == "killed":
            await leafed.leaf.kill()
        yield
        if how == "killed":
            await leafed.leaf.start()


@pytest.mark.parametrize("how", ["cut", "killed"])
async def test_streams_leave_a_leaf_that_is_lost_and_return_to_it(leafed: Leafed, how: str) -> None:
    async with (
        leafed.worker(leafed.leaf) as there,
        leafed.worker(leafed.hub) as here,
        leafed.made.bus("gateway", leafed.hub) as bus,
    ):
        await seen(bus, 2)
        found: list[int] = []
        pause, last = 0.0, time.monotonic()
        instance = there.bus.instance
        async with AsyncExitStack() as outage:
            while len(found) < TOKENS:
                start = len(found)
                request = Echo(count=TOKENS - start, delay_ms=5)
                try:
                    async with bus.open("tokenizer", request, instance=instance) as stream:
                        async for item in stream:
                            assert isinstance(item, Text)
                            now = time.monotonic()
                            pause, last = max(pause, now - last), now
                            if not found:
                                await outage.enter_async_context(lost(leafed, how))
                            found += [start + one for one in item.ids]
                except StreamBroken:
                    assert instance == there.bus.instance, "the hub's own worker is not concerned"
                    instance = here.bus.instance
            assert found == list(range(TOKENS))
            assert instance == here.bus.instance
        print(f"{how}: longest pause {pause:.2f} s")
        assert pause <= PAUSE
        await seen(bus, 2)
        again = bus.open("tokenizer", Echo(count=50), instance=there.bus.instance)
        assert await ids(again) == list(range(50))
