"""Test the NATS transport against a server that records the order of commands."""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from typing import Any

import nats.errors
import pytest

from motet_shared.errors import ConfigError, Unavailable
from motet_shared.process.config import ProcessConfig
from motet_shared.testing import MemoryHub, MemoryTransport, memory_bus
from motet_shared.wire.broker import SETTLE, Broker
from motet_shared.wire.bus import Bus
from motet_shared.wire.transport import NatsTransport, NatsUnreachable
from support.peers.stream_server import listening
from support.running.until import until

_INFO = (
    b'INFO {"server_id":"x","version":"2.12.0","proto":1,"headers":true,"max_payload":1048576}\r\n'
)


class RecordingServer:
    """Answer pings as a NATS server does. answered: the commands received before the last PING."""

    def __init__(self) -> None:
        self._received: list[bytes] = []
        self.answered: list[bytes] = []

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Serve one connection until it ends."""
        writer.write(_INFO)
        while line := await reader.readline():
            if line.startswith(b"PING"):
                self.answered = list(self._received)
                writer.write(b"PONG\r\n")
            else:
                self._received.append(line.strip())


async def test_a_flush_covers_a_subscription() -> None:
    """What subscribes and flushes receives what is published from then on."""
    recording = RecordingServer()
    async with listening(recording.serve) as port:
        transport = await NatsTransport.connect(
            f"nats://127.0.0.1:{port}", name="test", inbox_prefix="_INBOX"
        )
        await transport.subscribe("subject", lambda message: None)
        await transport.flush()
        assert b"SUB subject  1" in recording.answered
        await transport.close()


async def test_an_outage_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    """Every failed try is counted, and one of them is logged."""
    recording = RecordingServer()
    async with listening(recording.serve) as port:
        transport = await NatsTransport.connect(
            f"nats://127.0.0.1:{port}", name="test", inbox_prefix="_INBOX"
        )
    try:
        await until(lambda: transport.errors.get("ConnectionRefusedError", 0) >= 6)
    finally:
        await transport.close()
    logged = [record for record in caplog.records if "ConnectionRefusedError" in record.message]
    assert len(logged) == 1


async def test_a_failed_try_to_reconnect_leaves_no_connection() -> None:
    """The server accepts and says nothing, as one that is stopped does."""
    recording = RecordingServer()
    tries: list[StreamWriter] = []
    ended: list[StreamWriter] = []

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        if not tries:
            tries.append(writer)
            await recording.serve(reader, writer)
            return
        tries.append(writer)
        await reader.read()
        ended.append(writer)

    async with listening(serve) as port:
        transport = await NatsTransport.connect(
            f"nats://127.0.0.1:{port}", name="test", inbox_prefix="_INBOX"
        )
        tries[0].transport.abort()
        try:
            await until(lambda: len(ended) >= 2)
            assert len(tries) <= 1 + len(ended) + 1, "the good one, and the one that is tried now"
        finally:
            await transport.close()


async def _connect(port: int) -> NatsTransport:
    return await NatsTransport.connect(
        f"nats://127.0.0.1:{port}", name="test", inbox_prefix="_INBOX"
    )


class StallingServer(RecordingServer):
    """Greet as a NATS server does, and leave the pings of the first connection unanswered from `stall` on."""

    def __init__(self) -> None:
        super().__init__()
        self.connections: list[StreamWriter] = []
        self.stall = False
        self.unanswered = 0

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        self.connections.append(writer)
        is_first = len(self.connections) == 1
        writer.write(_INFO)
        while line := await reader.readline():
            if not line.startswith(b"PING"):
                continue
            if is_first and self.stall:
                self.unanswered += 1
            else:
                writer.write(b"PONG\r\n")


async def test_a_bus_closes_without_an_answer_to_its_flush(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both connections are closed; a bus that starts reports the timeout."""
    hub = MemoryHub()
    bus = await memory_bus(hub, "gateway")

    async def flush(transport: MemoryTransport) -> None:
        raise nats.errors.FlushTimeoutError

    monkeypatch.setattr(MemoryTransport, "flush", flush)
    await bus.close()
    assert (bus.control.connected, bus.frames.connected) == (False, False)
    with pytest.raises(nats.errors.FlushTimeoutError):
        await memory_bus(hub, "gateway")


async def test_a_bus_that_cannot_be_connected_leaves_no_connection() -> None:
    """The server refuses the second of its connections."""
    recording = RecordingServer()
    connections: list[StreamWriter] = []
    ended = asyncio.Event()

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        connections.append(writer)
        if len(connections) == 1:
            await recording.serve(reader, writer)
            ended.set()
        else:
            writer.write(_INFO + b"-ERR 'Authorization Violation'\r\n")
            await reader.read()

    async with listening(serve) as port:
        config = ProcessConfig(nats_url=f"nats://127.0.0.1:{port}", metrics_port=-1)
        with pytest.raises(ConfigError) as caught:
            await Bus.connect("gateway-1", config)
        assert not isinstance(caught.value, NatsUnreachable)
        await asyncio.wait_for(ended.wait(), 5.0)


@pytest.mark.timeout(20)
async def test_a_ping_fails_with_its_connection() -> None:
    """The next connection answers for none of the pings of the last."""
    server = StallingServer()
    async with listening(server.serve) as port:
        transport = await _connect(port)
        server.stall = True
        ping = asyncio.create_task(transport.ping())
        await until(lambda: server.unanswered == 1)
        server.connections[0].transport.abort()
        try:
            with pytest.raises(Unavailable):
                await asyncio.wait_for(ping, 2.0)
            await until(lambda: transport.connected)
            await transport.ping()
        finally:
            await transport.close()


@pytest.mark.timeout(20)
async def test_peers_are_watched_again_after_a_connection_that_was_lost_between_two_ticks() -> None:
    """The monitor sees a connection before and after; the echo in between is lost."""
    server = StallingServer()
    async with listening(server.serve) as port:
        transport = await _connect(port)
        broker = Broker([transport])
        server.stall = True
        broker.tick(0.1)  # sends an echo
        await until(lambda: server.unanswered == 1)
        server.connections[0].transport.abort()
        await until(lambda: len(server.connections) == 2 and transport.connected)
        try:
            broker.tick(0.1)
            assert not broker.settled, "peers may have lost messages as well"
            for _ in range(round((SETTLE + 0.5) / 0.1)):
                await transport.ping()
                broker.tick(0.1)
            assert broker.settled
        finally:
            await broker.close()
            await transport.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("closes", [True, False], ids=["closed", "cancelled"])
@pytest.mark.parametrize("steps", range(12))
async def test_closing_or_cancelling_ends_a_try_to_reconnect(
    steps: int, closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is gone; the connection is closed so many turns of the loop after a try began.

    Or all its tasks are cancelled once, as at the end of a loop.
    """
    tries = asyncio.Event()

    async def opening(*args: Any, **kwargs: Any) -> Any:
        tries.set()
        return await open_connection(*args, **kwargs)

    open_connection, server = asyncio.open_connection, StallingServer()
    async with listening(server.serve) as port:
        before = asyncio.all_tasks()
        transport = await _connect(port)
        server.connections[0].transport.abort()
    monkeypatch.setattr(asyncio, "open_connection", opening)
    await asyncio.wait_for(tries.wait(), 5.0)
    for _ in range(steps):
        await asyncio.sleep(0)
    if closes:
        await asyncio.wait_for(transport.close(), 5.0)
    else:
        for task in asyncio.all_tasks() - before:
            task.cancel()
    await until(lambda: asyncio.all_tasks() <= before, 1.0)
    await transport.close()
    assert not transport.connected


class AnsweringServer(RecordingServer):
    """Answer each request with its subject; lose the first of each, with its connection, if `loses`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[bytes] = []
        self.loses = False

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        writer.write(_INFO)
        inbox = b""
        while line := await reader.readline():
            words = line.split()
            if words[0] == b"PING":
                writer.write(b"PONG\r\n")
            elif words[0] == b"SUB":
                inbox = words[-1]
            elif words[0] in (b"PUB", b"HPUB"):
                await reader.readexactly(int(words[-1]) + 2)
                self.asked.append(words[1])
                if self.loses and self.asked.count(words[1]) == 1:
                    writer.transport.abort()
                    return
                size = len(words[1])
                writer.write(b"MSG %b %b %d\r\n%b\r\n" % (words[2], inbox, size, words[1]))


@pytest.mark.timeout(20)
async def test_a_request_that_may_be_repeated_outlives_its_connection() -> None:
    """Of others it is not known whether they had an effect, and they say so at once."""
    server = AnsweringServer()
    async with listening(server.serve) as port:
        transport = await _connect(port)
        try:
            await transport.request("subject", b"", timeout=5.0)  # makes the inbox
            server.loses = True
            async with asyncio.timeout(2.0):
                read = await transport.request("$JS.API.STREAM.INFO.x", b"", timeout=12.0)
                assert read == b"$JS.API.STREAM.INFO.x"
                pushed = await transport.client.request(
                    "jobs", b"", 12.0, headers={"Nats-Msg-Id": "1"}
                )
                assert pushed.data == b"jobs"
                with pytest.raises(Unavailable):
                    await transport.request("$KV.bucket.key", b"", timeout=12.0)
            assert [server.asked.count(name) for name in dict.fromkeys(server.asked)] == [
                1,
                2,
                2,
                1,
            ]
            assert await transport.request("$KV.bucket.key", b"", timeout=5.0) == b"$KV.bucket.key"
        finally:
            await transport.close()
