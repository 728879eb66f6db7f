"""Input of running streams over a real nats-server, under the permissions of services/nats.conf."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator

import pytest

from motet_shared import errors
from motet_shared.messages import FEED_WINDOW, Echo, Text
from motet_shared.process.actor import Actor, operation
from motet_shared.testing import NatsServer, running
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call
from motet_shared.wire.stream import Stream


class Ear(Actor):
    """Answers with the digest and the length of what it hears; with text="deaf" it reads nothing."""

    role = "tokenizer"

    @operation(Echo)
    async def listen(self, call: Call, request: Echo) -> None:
        if request.text == "deaf":
            await asyncio.Event().wait()
        digest, size = hashlib.blake2b(), 0
        async for data in call.received():
            digest.update(data)
            size += len(data)
        await call.send(Text(digest.hexdigest(), [size]))


@pytest.fixture
async def server() -> AsyncIterator[NatsServer]:
    async with NatsServer() as server:
        yield server


@contextlib.asynccontextmanager
async def stack(server: NatsServer) -> AsyncIterator[tuple[Bus, Ear]]:
    gateway = await server.bus("gateway")
    async with running(Ear(None, await server.bus("tokenizer"))) as ear:
        assert isinstance(ear, Ear)
        await gateway.directory.wait_for(lambda d: bool(d.ready("tokenizer")), 15)
        yield gateway, ear
        await gateway.close()


async def told(stream: Stream, parts: list[bytes]) -> Text:
    """The one answer to all of `parts`."""
    async with stream:
        for part in parts:
            await stream.send(part)
        await stream.end_input()
        (answer,) = [body async for body in stream]
    assert isinstance(answer, Text)
    return answer


def speech(number: int, count: int, size: int) -> list[bytes]:
    return [hashlib.shake_128(f"{number} {part}".encode()).digest(size) for part in range(count)]


async def test_many_streams_are_fed_at_once_and_none_hears_another(server: NatsServer) -> None:
    async with stack(server) as (gateway, ear):
        sent = [speech(number, 150, 960) for number in range(24)] + [speech(99, 3, 500_000)]
        answers = await asyncio.gather(
            *(told(gateway.open("tokenizer", Echo()), parts) for parts in sent)
        )
        for parts, answer in zip(sent, answers, strict=True):
            whole = b"".join(parts)
            assert (answer.text, answer.ids) == (hashlib.blake2b(whole).hexdigest(), [len(whole)])
        ear.check_integrity()
        gateway.check_integrity()


async def test_a_worker_that_does_not_read_is_sent_no_more_than_a_window(
    server: NatsServer,
) -> None:
    async with stack(server) as (gateway, ear):
        async with gateway.open("tokenizer", Echo(text="deaf")) as stream:
            sending = asyncio.create_task(told(stream, speech(0, 1000, 30_000)))
            parts = speech(1, 500, 20_000)
            assert (await told(gateway.open("tokenizer", Echo()), parts)).ids == [500 * 20_000]
            (call,) = ear.bus.calls.active.values()
            assert call.intake.received == FEED_WINDOW
            assert not sending.done()
        with pytest.raises(errors.StreamBroken):
            await sending


async def test_a_restart_of_nats_is_a_whole_input_or_a_typed_error(server: NatsServer) -> None:
    async with stack(server) as (gateway, ear):
        stream = gateway.open("tokenizer", Echo(), deadline=30)
        parts = speech(0, 400, 960)

        async def slowly() -> Text:
            async with stream:
                for part in parts:
                    await stream.send(part)
                    await asyncio.sleep(0.002)
                await stream.end_input()
                (answer,) = [body async for body in stream]
            assert isinstance(answer, Text)
            return answer

        sending = asyncio.create_task(slowly())
        await asyncio.sleep(0.2)
        await server.restart()
        with contextlib.suppress(errors.StreamBroken):
            assert (await sending).text == hashlib.blake2b(b"".join(parts)).hexdigest()
        again = await told(gateway.open("tokenizer", Echo(), deadline=30), parts)
        assert again.text == hashlib.blake2b(b"".join(parts)).hexdigest()
        assert not ear.bus.calls.active
