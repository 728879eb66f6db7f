"""Journal what the services answer to a connection's requests, and give it to their handlers again.

Each record has an effect, such as a write to the client, only behind its commit; and the effect
comes before the next record. So a handler that gets the same records renders the same writes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from enum import IntEnum

from .memory import BadMemory, ConnectionMemory

log = logging.getLogger(__name__)

Writable = Callable[[], Awaitable[None]]  # waits until the client reads
_REPLAY = 30.0  # seconds in which what is recorded has to be read before something else comes


class Record(IntEnum):
    """Name the kinds of records."""

    TIME = 1  # at which the request was first served
    BATCH = 2  # of a stream
    END = 3  # of a stream
    ERROR = 4  # at the end of a stream
    STREAM = 5  # its number belongs to the request with this digest


class Journal:
    """The journal of one connection's requests; `cursor` counts the records consumed so far.

    `full` is called when no more fits; `forgotten` then tells that nothing is recorded any more.
    `strayed` is called when the handler does not ask for what is recorded.
    """

    def __init__(
        self,
        memory: ConnectionMemory,
        full: Callable[[], None],
        strayed: Callable[[], None] = lambda: None,
    ):
        """Begin with the records in memory. Raises BadMemory."""
        self._memory, self._full, self._strayed = memory, full, strayed
        self._records: list[tuple[int, int, bytes]] = []
        self._numbers: dict[bytes, list[int]] = {}  # of recorded streams that nothing has asked for
        self._streams = 0  # the highest number
        for kind, stream, data in memory.records():
            self._streams = max(self._streams, stream)
            if kind == Record.STREAM:
                self._numbers.setdefault(data, []).append(stream)
            else:
                self._records.append((kind, stream, data))
        self._left = Counter(stream for _, stream, _ in self._records)
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
        self._numbers.clear()
        self._left.clear()
        self.cursor = self._streams = 0

    def time(self) -> int:
        """Return the Unix time at which the current request was first served, in seconds."""
        if self.is_replaying and self._records[self.cursor][0] == Record.TIME:
            return int.from_bytes(self._advance())
        now = int(time.time())
        self._append(Record.TIME, 0, now.to_bytes(8))
        return now

    def open(self, digest: bytes, writable: Writable) -> JournaledStream:
        """Return the stream of a request to a service; its response can go on in another process."""
        numbers = self._numbers.get(digest)
        self._memory.set_journaled()
        return JournaledStream(self, digest, numbers.pop(0) if numbers else None, writable)

    # -------------------------------------------------------------------------------------------- for its streams
    @property
    def generation(self) -> int:
        """Return a number that changes when all requests are answered."""
        return self._memory.state.generation

    def next_number(self, digest: bytes) -> int:
        """Return the number of a stream that is not recorded yet."""
        self._streams += 1
        self._put(Record.STREAM, self._streams, digest)
        return self._streams

    async def next(self, stream: int) -> tuple[int, bytes] | None:
        """Return the kind and data of a stream's next record, None if there is none."""
        while self._left[stream]:
            kind, number, _ = self._records[self.cursor]
            if number == stream:
                return kind, self._advance()
            await self._moved()
        return None

    async def append(self, kind: Record, stream: int, data: bytes) -> None:
        """Record something new, behind everything that was recorded."""
        if self.is_replaying:
            try:
                async with asyncio.timeout(_REPLAY):
                    while self.is_replaying:
                        await self._moved()
            except TimeoutError:
                log.warning("a reply cannot go on: its request asks the services something else")
                self._strayed()
        self._append(kind, stream, data)

    def _append(self, kind: Record, stream: int, data: bytes) -> None:
        if not (self.forgotten or self.is_replaying):
            self._put(kind, stream, data)
            self.cursor += 1

    def _put(self, kind: Record, stream: int, data: bytes) -> None:
        if self.forgotten:
            return
        try:
            self._memory.append(kind, stream, data)
        except BadMemory:
            self._full()

    def _advance(self) -> bytes:
        """Consume a record, and return its data."""
        _, stream, data = self._records[self.cursor]
        self.cursor += 1
        self._left[stream] -= 1
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()
        return data

    async def _moved(self) -> None:
        """Wait until another handler has consumed a record."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future


class JournaledStream:
    """What the services answer to one request: a `RecordedStream` of the pipelines."""

    def __init__(self, journal: Journal, digest: bytes, number: int | None, writable: Writable):
        """`number`: of the records of an earlier process. `writable`: that of the response."""
        self._journal, self._digest, self._number = journal, digest, number
        self._writable, self._generation = writable, journal.generation
        self.end: bytes | None = None
        self.error: bytes | None = None

    async def next(self) -> bytes | None:
        """Return the next recorded batch, None behind the last."""
        if self._number is None:
            return None
        found = await self._journal.next(self._number)
        if found is None:
            return None
        kind, data = found
        if kind == Record.BATCH:
            return data
        if kind == Record.END:
            self.end = data
        else:
            self.error = data
        return None

    async def append(self, data: bytes) -> None:
        """Record a batch once the client reads: what is recorded can be written at once."""
        await self._writable()
        await self._record(Record.BATCH, data)

    async def close(self, data: bytes, *, failed: bool) -> None:
        """Record the end, or an error."""
        await self._record(Record.ERROR if failed else Record.END, data)

    async def _record(self, kind: Record, data: bytes) -> None:
        journal = self._journal
        if self._generation != journal.generation:
            return  # the response ended before this
        if self._number is None:
            self._number = journal.next_number(self._digest)
        await journal.append(kind, self._number, data)
