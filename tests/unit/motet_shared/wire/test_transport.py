"""Test the NATS transport against a server that records the order of commands."""

from __future__ import annotations

from asyncio import StreamReader, StreamWriter

import pytest

from motet_shared.wire.transport import NatsTransport
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
