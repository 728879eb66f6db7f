"""Run a module without step batching and coalescing: `python -m benchmarks.stack.one_by_one motet_gateway …`.

It is the baseline of the plumbing benchmark: every frame is a message of its own, and every item is
handled, rendered and written alone. The services are unchanged.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import AsyncIterator
from typing import Any

from motet_shared.messages import Body
from motet_shared.wire.outbox import Outbox
from motet_shared.wire.stream import Stream


def install() -> None:
    """Patch the outbox and the streams of this process."""
    send_joined, take_all = Outbox._send, Stream.batches

    async def send(outbox: Outbox, subject: str, parts: list[Any]) -> None:
        for part in parts:
            await send_joined(outbox, subject, [part])

    async def batches(stream: Stream) -> AsyncIterator[list[Body]]:
        async for batch in take_all(stream):
            for body in batch:
                yield [body]

    Outbox._send = send  # type: ignore[method-assign, assignment]
    Stream.batches = batches  # type: ignore[method-assign, assignment]
    Stream.offer = Stream._wake  # type: ignore[method-assign]


if __name__ == "__main__":
    install()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
