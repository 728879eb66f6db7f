"""What `motet up` learns from `/health/ready`."""

from __future__ import annotations

import json
from asyncio import StreamReader, StreamWriter
from typing import Any

from motet_cli.supervision.readiness import Health, wait_until_ready
from support.peers.stream_server import listening

ANSWERS: list[tuple[str, dict[str, Any]]] = [
    ("503 Service Unavailable", {"missing": ["decode for m is not ready yet"], "models": []}),
    ("503 Service Unavailable", {"missing": ["encoder for m is not ready yet"], "models": ["m"]}),
    ("200 OK", {"models": ["m"]}),
]


async def test_chat_is_seen_before_the_whole_stack_is_ready() -> None:
    """Services that wait for chat may start while others are missing."""
    left, seen = list(ANSWERS), list[Health]()

    async def answer(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        status, body = left.pop(0)
        writer.write(f"HTTP/1.0 {status}\r\n\r\n{json.dumps(body)}".encode())
        await writer.drain()

    async with listening(answer) as port:
        await wait_until_ready("127.0.0.1", port, lambda seconds, health: seen.append(health))
    assert [health.chat for health in seen] == [False, True]
    assert [health.status for health in seen] == [503, 503]
    assert not left
