"""Forms that are made to be slow to parse."""

from __future__ import annotations

import asyncio
from typing import Any

from motet_gateway.http.exchange import Exchange
from motet_gateway.http.multipart import read_form

PIECE = 64 << 10


async def test_a_form_of_near_boundaries_leaves_the_loop_to_others() -> None:
    near = b"\r\n--bX" * 100_000  # small enough to be written without a thread
    head = b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
    body, turns = head + near + b"\r\n--b--\r\n", 0

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    headers = [(b"content-type", b"multipart/form-data; boundary=b")]
    http = Exchange({"type": "http", "path": "/", "headers": headers}, receive, send)
    running = asyncio.create_task(others())
    form = await read_form(http, len(body))
    running.cancel()
    assert form.file == near
    assert turns >= len(body) // PIECE
