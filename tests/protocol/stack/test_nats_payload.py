"""Test what a NATS server does with a message that is too large, and that a client outlives it."""

from __future__ import annotations

import asyncio

import pytest
from nats.aio.client import Client

from motet_shared.errors import PayloadTooLarge
from motet_shared.testing import NatsServer
from motet_shared.wire.transport import NatsTransport
from support.running.until import until

_HEADERS = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}


async def test_headers_count_in_what_a_message_may_have() -> None:
    async with NatsServer() as nats:
        bus = await nats.bus("gateway")
        try:
            transport = bus.frames
            assert isinstance(transport, NatsTransport)
            client, data = transport.client, bytes(transport.max_payload - 20)
            with pytest.raises(PayloadTooLarge):
                await transport.publish("motet.test", data, headers=_HEADERS)
            await transport.publish("motet.test", data)
            await transport.flush()
            assert client.is_connected
            assert client.stats["reconnects"] == 0

            # The server ends the connection of a message that comes all the same.
            await Client._send_publish(client, "motet.test", "", data, len(data), _HEADERS)
            async with asyncio.timeout(20):
                await until(lambda: client.stats["reconnects"] > 0 and client.is_connected)
            await transport.flush()
        finally:
            await bus.close()
