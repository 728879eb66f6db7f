"""Queue the events of a conversation for a caller that iterates over them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from .events import Event


class EventQueue:
    """Queue batches of events (an `EventSink`)."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[list[Event], asyncio.Future[None] | None] | None] = (
            asyncio.Queue()
        )
        self._left = False

    @property
    def is_free(self) -> bool:
        """Return False: a batch waits for the caller's next step."""
        return False

    def post(self, *events: Event) -> None:
        """Queue a batch."""
        self._queue.put_nowait((list(events), None))

    async def emit(self, *events: Event) -> None:
        """Queue a batch and wait until the caller has handled it."""
        handled = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((list(events), handled))
        if not self._left:
            await handled

    def close(self) -> None:
        """End `batches` behind what is queued."""
        self._queue.put_nowait(None)

    def leave(self) -> None:
        """Let nothing wait any more: the caller has left."""
        self._left = True
        while not self._queue.empty():
            if (entry := self._queue.get_nowait()) is not None:
                _handled(entry[1])

    async def batches(self) -> AsyncGenerator[list[Event], None]:
        """Yield the batches; one is handled when the next is requested."""
        while (entry := await self._queue.get()) is not None:
            batch, handled = entry
            try:
                yield batch
            finally:
                _handled(handled)


def _handled(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
