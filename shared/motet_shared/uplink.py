"""What a caller sends into a stream while it runs: both ends of it.

    await stream.send(pcm)                      # caller: waits while the worker is behind
    await stream.end_input()

    async for pcm in call.received():           # worker: reading grants credit for more
        ...

Feeds are numbered and granted like items, in the other direction. A caller sends at most `FEED_WINDOW` feeds more than
the worker has read, so that is the most either end ever keeps. One that says nothing for `TELL_AFTER` tells how many
it has sent: the worker notices a lost tail, and repeats its last grant in case that was lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from .errors import BadRequest, MotetError, StreamGap
from .messages import FEED_SIZE, FEED_WINDOW, Feed, Want

TELL_AFTER = 0.2  # seconds without a feed


def split(data: bytes) -> Iterator[bytes]:
    """`data` in parts that fit into a feed; the cuts are at even offsets, so that no 16-bit sample is torn."""
    for start in range(0, len(data), FEED_SIZE):
        yield data[start : start + FEED_SIZE]


class Uplink:
    """The caller's end. Until the worker is known it keeps what was sent: an open may reach several instances."""

    def __init__(self, stream: int):
        self.sent = 0
        self.ended = False
        self._stream = stream
        self._total = FEED_WINDOW
        self._put: Callable[[Feed], None] | None = None
        self._kept: list[Feed] = []
        self._quiet = 0.0  # seconds since the last feed, in ticks of the monitor
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def has_room(self) -> bool:
        return self.sent < self._total

    async def room(self) -> None:
        """Wait for a grant, or for the end of the stream."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def push(self, data: bytes) -> None:
        """Send one part, not empty. The pusher must have seen `has_room`."""
        self._send(Feed(self._stream, self.sent, data))
        self.sent += 1

    def end(self) -> None:
        self.ended = True
        self._send(self._position())
        self.wake()

    def bind(self, put: Callable[[Feed], None]) -> None:
        """The worker is known: what was kept goes to it, and so does all that follows. Only the first call counts."""
        if self._put is None:
            self._put = put
            kept, self._kept = self._kept, []
            for feed in kept:
                self._send(feed)

    def grant(self, total: int) -> None:
        if total > self._total:
            self._total = total
            self.wake()

    def wake(self) -> None:
        """Have everybody in `room` look again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def tick(self, elapsed: float) -> None:
        """Let `elapsed` seconds pass."""
        self._quiet += elapsed
        if self._put is not None and self._quiet >= TELL_AFTER - 0.01:
            self._send(self._position())

    def _position(self) -> Feed:
        return Feed(self._stream, self.sent, b"", self.ended)

    def _send(self, feed: Feed) -> None:
        self._quiet = 0.0
        if self._put is None:
            self._kept.append(feed)
        else:
            self._put(feed)


class Intake:
    """The worker's end: feeds that have arrived and were not read yet, never more than were granted."""

    def __init__(self, stream: int, put: Callable[[Want], None]):
        self.received = 0  # feeds that have arrived
        self._stream = stream
        self._put = put
        self._taken = 0  # feeds handed to the reader
        self._granted = FEED_WINDOW
        self._waiting: deque[bytes] = deque()
        self._ended = False
        self._error: MotetError | None = None
        self._arrived = asyncio.Event()

    async def read(self) -> AsyncIterator[bytes]:
        """Feeds in order until the caller's `end_input`. What was fed before an error comes before it."""
        while True:
            while self._waiting:
                data = self._waiting.popleft()
                self._taken += 1
                if self._granted - self._taken <= FEED_WINDOW // 2:
                    self._granted = self._taken + FEED_WINDOW
                    self._grant()
                yield data
            if self._error is not None:
                raise self._error
            if self._ended:
                return
            self._arrived.clear()
            await self._arrived.wait()

    def on_feed(self, feed: Feed) -> None:
        """One from the wire, maybe for the second time, maybe against the rules."""
        if self._error is not None:
            return
        if feed.seq > self.received:
            self._error = StreamGap(f"input of stream {self._stream}: expected {self.received}, got {feed.seq}")
        elif feed.seq == self.received:
            self._next(feed)
        self._arrived.set()

    def _next(self, feed: Feed) -> None:
        if feed.data and (self._ended or self.received >= self._granted or len(feed.data) > FEED_SIZE):
            self._error = BadRequest(
                f"input of stream {self._stream}: feed {feed.seq} of {len(feed.data)} bytes comes "
                f"{'after the last one' if self._ended else f'with a credit of {self._granted}'}; "
                f"send at most {FEED_SIZE} bytes at a time, and no more feeds than were granted"
            )
            return
        if feed.data:
            self._waiting.append(feed.data)
            self.received += 1
        elif self._granted > FEED_WINDOW:
            self._grant()  # in case the last grant was lost
        self._ended = self._ended or feed.last

    def _grant(self) -> None:
        self._put(Want(self._stream, self._granted))
