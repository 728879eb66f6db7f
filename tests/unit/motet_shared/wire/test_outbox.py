"""What leaves together goes together, and nothing that goes wrong with one part silences the rest."""

import pytest

from motet_shared.messages import encode
from motet_shared.testing import MemoryHub, settle
from motet_shared.wire.outbox import Outbox


async def sent(outbox: Outbox, hub: MemoryHub, *parts: object) -> list[bytes]:
    heard: list[bytes] = []
    await hub.transport().subscribe("to.me", lambda message: heard.append(message.data))
    outbox.start()
    for part in parts:
        outbox.put("to.me", part)
    await settle()
    await outbox.close()
    return heard


async def test_parts_of_one_turn_are_one_message() -> None:
    hub = MemoryHub()
    outbox = Outbox(hub.transport(), encode)
    assert await sent(outbox, hub, 1, 2, 3) == [encode([1, 2, 3])]
    assert (outbox.messages, outbox.parts) == (1, 3)


async def test_without_an_envelope_each_part_is_a_message() -> None:
    hub = MemoryHub()
    assert await sent(Outbox(hub.transport()), hub, b"a", b"b") == [b"a", b"b"]


async def test_what_is_too_large_together_goes_in_pieces() -> None:
    hub = MemoryHub(max_payload=20)
    outbox = Outbox(hub.transport(), encode, oversize=lambda part, error: "big")
    heard = await sent(outbox, hub, "x" * 12, "y" * 12, "z" * 30)
    assert heard == [encode(["x" * 12]), encode(["y" * 12]), encode(["big"])]


async def test_a_part_that_cannot_be_encoded_does_not_silence_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub = MemoryHub()
    outbox = Outbox(hub.transport(), encode)
    assert await sent(outbox, hub, 1, object(), 2) == [encode([1]), encode([2])]
    assert outbox.failed == 1
    assert "a part for to.me cannot be encoded" in caplog.text


async def test_text_that_has_no_bytes_ends_its_own_stream_alone() -> None:
    hub = MemoryHub()
    outbox = Outbox(hub.transport(), encode, oversize=lambda part, error: error.code)
    heard = await sent(outbox, hub, "a", "\ud800", "b")
    assert heard == [encode(["a"]), encode(["internal"]), encode(["b"])]


async def test_a_cut_connection_is_counted() -> None:
    hub = MemoryHub()
    transport = hub.transport()
    outbox = Outbox(transport, encode)
    transport.cut()
    assert await sent(outbox, hub, 1) == []
    assert outbox.failed == 1
