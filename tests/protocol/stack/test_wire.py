"""The wire over a real nats-server, under the permissions of services/nats.conf."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable

import nats
import pytest
import uvloop

from motet_shared import errors
from motet_shared.messages import Echo, Open, encode
from motet_shared.process.config import ProcessConfig
from motet_shared.testing import NatsServer, running
from motet_shared.wire import subjects
from motet_shared.wire.bus import Bus
from support.running.service_process import service_process
from support.running.until import until
from support.services.echo_worker import EchoWorker
from support.services.stream_world import ids

RECONNECT_SECONDS = 60  # usual are 2


@pytest.fixture
async def server() -> AsyncIterator[NatsServer]:
    async with NatsServer() as server:
        yield server


@contextlib.asynccontextmanager
async def connected(server: NatsServer, role: str) -> AsyncIterator[Bus]:
    bus = await server.bus(role)
    try:
        yield bus
    finally:
        await bus.close()


@contextlib.asynccontextmanager
async def echo_worker(server: NatsServer) -> AsyncIterator[EchoWorker]:
    async with running(EchoWorker(None, await server.bus("tokenizer"))) as actor:
        yield actor


async def seen(bus: Bus, count: int = 1) -> None:
    await bus.directory.wait_for(lambda d: len(d.ready("tokenizer")) >= count, 60)


async def retryable(work: Awaitable[list[int]]) -> list[int] | None:
    """Its result, None after a retryable error."""
    try:
        return await work
    except (errors.Unavailable, errors.StreamBroken):
        return None


async def test_many_streams_at_once(server: NatsServer) -> None:
    async with connected(server, "gateway") as gateway, echo_worker(server) as worker:
        await seen(gateway)
        streams = [
            gateway.open("tokenizer", Echo(count=100, text="x"), window=16) for _ in range(64)
        ]
        assert await asyncio.gather(*map(ids, streams)) == [list(range(100))] * 64
        outbox = worker.bus.calls.outbox
        assert outbox.messages < outbox.parts / 4, "frames of one step share a message"
        worker.check_integrity()
        gateway.check_integrity()


async def test_two_instances_share_the_work_and_one_can_be_chosen(server: NatsServer) -> None:
    async with (
        connected(server, "gateway") as gateway,
        echo_worker(server) as one,
        echo_worker(server) as two,
    ):
        await seen(gateway, 2)
        await asyncio.gather(*(ids(gateway.open("tokenizer", Echo(count=1))) for _ in range(40)))
        assert min(one.bus.calls.requests, two.bus.calls.requests) > 5
        stream = gateway.open("tokenizer", Echo(count=1), instance=two.bus.instance)
        await ids(stream)
        assert stream.instance == two.bus.instance


async def test_a_slow_reader_slows_only_itself(server: NatsServer) -> None:
    async with connected(server, "gateway") as gateway, echo_worker(server) as worker:
        await seen(gateway)
        async with gateway.open(
            "tokenizer", Echo(count=10_000, text="x" * 1000), window=32
        ) as slow:
            assert len(await ids(gateway.open("tokenizer", Echo(count=2000)))) == 2000
            assert slow.received <= 32
        await until(lambda: not worker.bus.calls.active)


async def test_restart_of_nats(server: NatsServer) -> None:
    async with connected(server, "gateway") as gateway, echo_worker(server):
        await seen(gateway)
        before = gateway.open("tokenizer", Echo(count=30, delay_ms=100))
        reading = asyncio.create_task(ids(before))
        await until(lambda: before.received > 3)
        await server.kill()
        await asyncio.sleep(0.5)
        await server.start()
        deadline = time.monotonic() + RECONNECT_SECONDS
        while (
            got := await retryable(ids(gateway.open("tokenizer", Echo(count=5))))
        ) is None:  # a retry
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert got == list(range(5))
        # What ran meanwhile goes on or ends with a retryable error, and never skips.
        assert await retryable(reading) in (list(range(30)), None)


async def test_sigkill_of_a_worker_process_is_noticed_at_once(server: NatsServer) -> None:
    async with (
        connected(server, "gateway") as gateway,
        service_process(server, "support.services.echo_worker") as process,
    ):
        await seen(gateway)
        stream = gateway.open("tokenizer", Echo(count=1000, delay_ms=10))
        reading = asyncio.create_task(ids(stream))
        await until(lambda: stream.received > 5)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(errors.WorkerLost):
            await asyncio.wait_for(reading, 10)
        assert not gateway.directory.ready("tokenizer")


async def test_a_stopped_worker_is_noticed_and_what_it_says_later_is_dropped(
    server: NatsServer,
) -> None:
    async with (
        connected(server, "gateway") as gateway,
        service_process(server, "support.services.echo_worker") as process,
    ):
        await seen(gateway)
        stream = gateway.open("tokenizer", Echo(count=1000, delay_ms=10))
        reading = asyncio.create_task(ids(stream))
        await until(lambda: stream.received > 5)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(errors.WorkerLost):
            await asyncio.wait_for(reading, 10)
        process.send_signal(signal.SIGCONT)
        await seen(gateway)
        assert await ids(gateway.open("tokenizer", Echo(count=5))) == list(range(5))


async def test_sigterm_drains_and_exits_with_zero(server: NatsServer) -> None:
    async with (
        connected(server, "gateway") as gateway,
        service_process(server, "support.services.echo_worker") as process,
    ):
        await seen(gateway)
        stream = gateway.open("tokenizer", Echo(count=20, delay_ms=20))
        reading = asyncio.create_task(ids(stream))
        await until(lambda: stream.received > 2)
        process.terminate()
        assert await asyncio.wait_for(reading, 15) == list(range(20))
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_a_second_sigterm_sends_what_runs_elsewhere(server: NatsServer) -> None:
    async with (
        connected(server, "gateway") as gateway,
        service_process(server, "support.services.echo_worker") as process,
    ):
        await seen(gateway)
        stream = gateway.open("tokenizer", Echo(count=100_000, delay_ms=20))
        reading = asyncio.create_task(ids(stream))
        await until(lambda: stream.received > 2)
        process.terminate()
        await until(
            lambda: (
                [beat.state for beat in gateway.directory.instances("tokenizer")] == ["draining"]
            )
        )
        assert not reading.done()
        process.terminate()
        with pytest.raises(errors.Draining):
            await asyncio.wait_for(reading, 15)
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_a_dead_caller_process_frees_its_calls(server: NatsServer) -> None:
    async with echo_worker(server) as worker:
        gateway = await server.bus("gateway")
        await seen(gateway)
        for _ in range(8):
            await gateway.open("tokenizer", Echo(count=10_000, delay_ms=5)).start()
        await until(lambda: len(worker.bus.calls.active) == 8)
        await gateway.monitor.close()  # no goodbye: the connections just end
        await gateway.control.close()
        await gateway.frames.close()
        await until(lambda: not worker.bus.calls.active)


async def test_permissions_are_refused_and_reported(server: NatsServer) -> None:
    async with connected(server, "gateway") as gateway:
        await gateway.control.publish(subjects.operation("decode", "generate"), b"x")
        await gateway.control.publish(subjects.frames_to("tokenizer-1"), b"x")
        await gateway.control.publish(subjects.heartbeat("decode-1"), b"x")
        await until(lambda: sum(gateway.control.errors.values()) >= 3)  # type: ignore[attr-defined]
    with pytest.raises(errors.ConfigError):
        await Bus.connect("gateway-x", ProcessConfig(nats_url=server.url, nats_password="wrong"))


async def test_the_service_api_answers_like_any_nats_service(server: NatsServer) -> None:
    async with echo_worker(server) as worker, connected(server, "gateway") as gateway:
        await seen(gateway)
        await ids(gateway.open("tokenizer", Echo(count=3)))
        client = await nats.connect(
            server.url, user="operator", password=server.passwords["operator"]
        )
        try:
            answers: list[dict] = []
            inbox = client.new_inbox()

            async def collect(message) -> None:
                answers.append(json.loads(message.data))

            await client.subscribe(inbox, cb=collect)
            await client.publish("$SRV.PING", b"", reply=inbox)
            await until(lambda: len(answers) == 2)
            assert {a["type"] for a in answers} == {"io.nats.micro.v1.ping_response"}
            assert {a["name"] for a in answers} == {"motet-gateway", "motet-tokenizer"}
            stats = json.loads(
                (
                    await client.request(f"$SRV.STATS.motet-tokenizer.{worker.bus.instance}", b"")
                ).data
            )
            assert stats["type"] == "io.nats.micro.v1.stats_response"
            endpoint = stats["endpoints"][0]
            assert (endpoint["name"], endpoint["num_requests"], endpoint["num_errors"]) == (
                "echo",
                1,
                0,
            )
            assert endpoint["data"]["state"] == "ready"
            info = json.loads((await client.request("$SRV.INFO.motet-tokenizer", b"")).data)
            assert info["endpoints"][0]["subject"] == "motet.v2.tokenizer.echo"
        finally:
            await client.close()


async def test_garbage_on_every_subject_harms_nobody(server: NatsServer) -> None:
    async with connected(server, "gateway") as gateway, echo_worker(server) as worker:
        await seen(gateway)
        me, it = gateway.instance, worker.bus.instance
        targets = [
            (gateway, subjects.operation("tokenizer", "echo")),
            (gateway, subjects.open_at(it)),
            (gateway, subjects.control_at(it)),
            (gateway, subjects.feeds_to(it)),
            (gateway, subjects.heartbeat(me)),
            (worker.bus, subjects.frames_to(me)),
            (worker.bus, subjects.control_at(me)),
        ]
        wrong_version = encode(Open(v=99, caller=me, stream=1, credit=1, body=Echo()))
        junk = [
            b"",
            b"\x00",
            b"\xc1" * 100,
            b"\x81\xa1v\x63",
            wrong_version,
            encode({"type": "nope"}),
            os.urandom(5000),
        ]
        for sender, subject in targets:
            for data in junk:
                await sender.control.publish(subject, data, reply=subjects.open_reply(me, 12345))
        assert await ids(gateway.open("tokenizer", Echo(count=50))) == list(range(50))
        dropped = worker.bus.stats()["dropped"]
        assert dropped["malformed_message"] >= 10
        assert dropped["protocol_mismatch"] >= 2
        assert dropped["malformed_controls"] >= 5
        assert dropped["malformed_feeds"] >= 5
        assert dropped["malformed_heartbeat"] >= 5
        # Frames come on a connection of their own, whose messages are in no order with those of the others.
        async with asyncio.timeout(20):
            while gateway.stats()["dropped"].get("malformed_frames", 0) < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_oversize_is_refused_before_it_is_sent(server: NatsServer) -> None:
    async with connected(server, "gateway") as gateway, echo_worker(server):
        await seen(gateway)
        limit = gateway.control.max_payload
        with pytest.raises(errors.PayloadTooLarge, match=str(limit)):
            await ids(gateway.open("tokenizer", Echo(text="x" * (limit + 1))))
        # Together the items are too large for one message: they go as two.
        assert await ids(gateway.open("tokenizer", Echo(count=2, text="x" * (limit - 200)))) == [
            0,
            1,
        ]


def test_a_connection_that_is_gone_is_closed_without_a_word() -> None:
    """A service that is told to end while NATS is away, under the loop that services run on."""

    async def end_while_nats_is_away() -> None:
        async with NatsServer() as server:
            bus = await server.bus("tokenizer")
            await server.kill()
            await bus.control.publish(subjects.heartbeat(bus.instance), b"x" * 1000)
            await bus.close()

    uvloop.run(asyncio.wait_for(end_while_nats_is_away(), 60))
