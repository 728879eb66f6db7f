"""WebSocket frames that break the protocol, or use what it seldom needs: each ends its own connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import websockets
from websockets.frames import Frame, Opcode

from motet_gateway.service import Gateway
from motet_shared.testing import NatsServer, running
from support.services.fake_services import MODEL, FakeDecode, FakeTokenizer
from support.stages.served_gateway import KEY, served_gateway

LIMIT = 15.0  # seconds until a test that waits for the gateway fails
NO_TEXT = b'{"type": "\xff\xfe"}'


@pytest_asyncio.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with NatsServer() as nats:
        tokenizer = FakeTokenizer(None, await nats.bus("tokenizer"))
        decode = FakeDecode(None, await nats.bus("decode"))
        async with running(tokenizer), running(decode), served_gateway(nats) as made:
            await made.bus.directory.wait_for(
                lambda d: d.ready("tokenizer") and d.ready("decode"), LIMIT
            )
            yield made


async def closed_with(gateway: Gateway, *frames: tuple[Opcode, bytes, bool]) -> int | None:
    """Return the code with which the gateway closes a session after these frames."""
    url = f"ws://127.0.0.1:{gateway.port}/v1/realtime?model={MODEL}"
    headers = {"Authorization": f"Bearer {KEY}"}
    async with websockets.connect(url, additional_headers=headers, proxy=None) as socket:
        await socket.recv()
        data = [Frame(opcode, data, fin).serialize(mask=True) for opcode, data, fin in frames]
        socket.transport.write(b"".join(data))
        async with asyncio.timeout(LIMIT):
            await socket.wait_closed()
        return socket.close_code


async def test_a_text_that_is_no_utf8_ends_its_connection_and_fills_no_log(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for frames in (
            [(Opcode.TEXT, NO_TEXT, True)] * 20,
            [(Opcode.TEXT, NO_TEXT[:11], False), (Opcode.CONT, NO_TEXT[11:], True)],
        ):
            assert await closed_with(gateway, *frames) == 1007
    assert not [one for one in caplog.records if one.exc_info or one.levelno > logging.INFO]


async def test_a_close_within_a_message_is_answered_as_any_other(gateway: Gateway) -> None:
    """RFC 6455, section 5.4: control frames may stand between the fragments of a message."""
    begun = (Opcode.TEXT, b'{"type": ', False)
    assert await closed_with(gateway, begun, (Opcode.CLOSE, b"\x03\xe8", True)) == 1000


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([(Opcode.CONT, b"x", True)], 1002),
        ([(Opcode.TEXT, b"x", False), (Opcode.TEXT, b"x", True)], 1002),
        ([(Opcode.CLOSE, b"\x03", True)], 1002),
        ([(Opcode.CLOSE, b"\x03\xe7", True)], 1002),
        ([(Opcode.CLOSE, b"\x03\xe8\xff", True)], 1007),
        ([(Opcode.TEXT, b"x" * (2**24 + 1), True)], 1009),
    ],
)
async def test_frames_that_break_the_protocol_end_their_connection(
    gateway: Gateway,
    frames: list[tuple[Opcode, bytes, bool]],
    code: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert await closed_with(gateway, *frames) == code
    assert not [one for one in caplog.records if one.exc_info or one.levelno > logging.INFO]
