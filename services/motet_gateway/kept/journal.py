"""Journal what the services answer to a connection's requests, and give it to their handlers again.

Each record has an effect, such as a write to the client, only behind its commit; and the effect
comes before the next record. So a handler that gets the same records renders the same writes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from enum import IntEnum
from typing import Any

import msgspec

from motet_pipelines.chat.chat import Outcome
from motet_shared.messages import End, PromptPiece, TargetText, Text

from .memory import BadMemory, ConnectionMemory

Source = Callable[[Any, Outcome], AsyncGenerator[list[Any], None]]  # opens the reply to a request

_encode = msgspec.msgpack.Encoder().encode
_batches: msgspec.msgpack.Decoder[list[Text | TargetText | PromptPiece]] = msgspec.msgpack.Decoder(
    list[Text | TargetText | PromptPiece]
)
_ends = msgspec.msgpack.Decoder(End)


class Record(IntEnum):
    """Name the kinds of records."""

    TIME = 1  # at which the request was first served
    BATCH = 2  # of a reply's stream
    END = 3  # of a reply's stream


class Journal:
    """The journal of one connection's requests; `cursor` counts the records consumed so far.

    `full` is called when no more fits, or when a record is not what its handler needs; `forgotten`
    then tells that nothing is recorded any more.
    """

    def __init__(self, memory: ConnectionMemory, full: Callable[[], None]):
        """Begin with the records in memory. Raises BadMemory."""
        self._memory, self._full = memory, full
        self._records = memory.records()
        self._streams = 0
        self._waiting: list[asyncio.Future[None]] = []
        self.cursor = 0
        self.forgotten = False

    @property
    def is_replaying(self) -> bool:
        """Return True while there are records of an earlier process."""
        return self.cursor < len(self._records)

    def reset(self) -> None:
        """Begin again: all requests are answered."""
        self._records = []
        self.cursor = self._streams = 0

    def time(self) -> int:
        """Return the Unix time at which the current request was first served, in seconds."""
        if self.is_replaying and self._records[self.cursor][0] == Record.TIME:
            data = self._records[self.cursor][2]
            self._advance()
            return int.from_bytes(data)
        now = int(time.time())
        self._append(Record.TIME, 0, now.to_bytes(8))
        return now

    async def batches(
        self,
        source: Source,
        writable: Callable[[], Awaitable[None]],
        request: Any,
        outcome: Outcome,
    ) -> AsyncGenerator[list[Any], None]:
        """Yield the batches of a reply: those recorded, then those of `source` behind them.

        `writable` waits until the client reads: what is recorded can be written at once.
        """
        number = self._streams
        self._streams += 1
        self._memory.set_journaled()
        while self.is_replaying:
            kind, stream, data = self._records[self.cursor]
            if stream != number or kind == Record.TIME:
                await self._moved()
                continue
            self._advance()
            if kind == Record.END:
                outcome.end = _ends.decode(data)
                return
            batch = _batches.decode(data)
            outcome.received.append(_batches.decode(data))  # the handler may change its own
            yield list(batch)
        async with aclosing(source(request, outcome)) as live:
            async for batch in live:
                await writable()
                self._append(Record.BATCH, number, _encode(batch))
                yield batch
        if outcome.end is not None:
            self._append(Record.END, number, _encode(outcome.end))

    def _append(self, kind: Record, stream: int, data: bytes) -> None:
        if self.forgotten or self.is_replaying:
            return
        try:
            self._memory.append(kind, stream, data)
        except BadMemory:
            self._full()
        else:
            self.cursor += 1

    def _advance(self) -> None:
        self.cursor += 1
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def _moved(self) -> None:
        """Wait until another handler has consumed a record."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future
