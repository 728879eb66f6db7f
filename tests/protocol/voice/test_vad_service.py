"""The voice activity service as real processes behind a real nats-server, under their own user, killed and replaced."""

import asyncio
import signal

import pytest

from motet_shared.errors import WorkerLost
from motet_shared.messages import Detect, SpeechEdge
from motet_shared.testing import NatsServer
from motet_shared.wire.bus import Bus
from motet_shared.wire.stream import Stream
from support.media.spoken import say, silence
from support.running.service_process import service_process

SPEECH = silence(400) + say("Two red circles and a blue square.") + silence(900)


async def edges(stream: Stream, pcm: bytes) -> list[SpeechEdge]:
    async with stream:
        for start in range(0, len(pcm), 960):
            await stream.send(pcm[start : start + 960])
        await stream.end_input()
        return [body async for body in stream if isinstance(body, SpeechEdge)]


async def talk_on(stream: Stream) -> None:
    """Until the stream breaks."""
    while True:
        await stream.send(SPEECH[:960])
        await asyncio.sleep(0.01)


async def ready(gateway: Bus, count: int) -> list[str]:
    await gateway.directory.wait_for(lambda d: len(d.ready("vad")) == count, 60)
    return [beat.instance for beat in gateway.directory.ready("vad")]


async def test_an_instance_that_is_killed_is_noticed_and_another_hears_the_same() -> None:
    async with (
        NatsServer() as server,
        service_process(server, "motet_vad") as one,
        service_process(server, "motet_vad") as two,
    ):
        gateway = await server.bus("gateway")
        try:
            await ready(gateway, 2)
            due = await edges(gateway.open("vad", Detect()), SPEECH)
            assert [edge.kind for edge in due] == ["start", "stop"]
            stream = gateway.open("vad", Detect())
            await stream.send(SPEECH[:48000])
            async with asyncio.timeout(30):
                assert await anext(stream.batches()) == due[:1]
            pids = {beat.instance: beat.pid for beat in gateway.directory.ready("vad")}
            assert stream.instance is not None
            dead, alive = (one, two) if pids[stream.instance] == one.pid else (two, one)
            dead.send_signal(signal.SIGKILL)
            with pytest.raises(WorkerLost):
                await asyncio.wait_for(talk_on(stream), 15)
            await stream.aclose()
            await ready(gateway, 1)
            again = gateway.open("vad", Detect())
            assert await edges(again, SPEECH) == due
            assert pids[str(again.instance)] == alive.pid
            alive.terminate()
            assert await asyncio.wait_for(alive.wait(), 20) == 0
        finally:
            await gateway.close()
