"""Send input into a running stream: the caller's end and the worker's end.

    await stream.send(pcm)                      # caller: waits while the worker is behind
    await stream.end_input()

    async for pcm in call.received():           # worker: reading grants credit for more
        ...

Feeds are numbered and granted like items, in the other direction. A caller sends at most
`FEED_WINDOW` feeds more than the worker has read, which bounds the buffers of both ends. After
`REPORT_AFTER` seconds without a feed the caller reports how many it has sent: the worker detects a
lost tail, and repeats its last grant in case that was lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from motet_shared.errors import BadRequest, MotetError, StreamGap
from motet_shared.messages import FEED_SIZE, FEED_WINDOW, Feed, FeedCredit

REPORT_AFTER = 0.2  # seconds without a feed


def split(data: bytes) -> Iterator[bytes]:
    """Yield `data` in parts of at most `FEED_SIZE` bytes.

    Cuts are at even offsets, so that no 16-bit sample is split.
    """
    for start in range(0, len(data), FEED_SIZE):
        yield data[start : start + FEED_SIZE]


class InputSender:
    """Send the caller's input of one stream.

    Feeds are kept until the worker is known, since an open may reach several instances.
    """

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
        """Return True if another feed may be sent."""
        return self.sent < self._total

    async def room(self) -> None:
        """Wait for a grant, or for the end of the stream."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def push(self, data: bytes) -> None:
        """Send one non-empty part; the caller of `push` must have checked `has_room`."""
        self._send(Feed(self._stream, self.sent, data))
        self.sent += 1

    def end(self) -> None:
        """Send the end of the input."""
        self.ended = True
        self._send(self._position())
        self.wake()

    def bind(self, put: Callable[[Feed], None]) -> None:
        """Send the kept feeds and all that follow with `put`; only the first call has an effect."""
        if self._put is None:
            self._put = put
            kept, self._kept = self._kept, []
            for feed in kept:
                self._send(feed)

    def grant(self, total: int) -> None:
        """Allow `total` feeds since the start; lower totals are ignored."""
        if total > self._total:
            self._total = total
            self.wake()

    def wake(self) -> None:
        """Wake all waiters of `room` so that they check again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def tick(self, elapsed: float) -> None:
        """Advance time by `elapsed` seconds; report the position after `REPORT_AFTER` of silence."""
        self._quiet += elapsed
        if self._put is not None and self._quiet >= REPORT_AFTER - 0.01:
            self._send(self._position())

    def _position(self) -> Feed:
        return Feed(self._stream, self.sent, b"", self.ended)

    def _send(self, feed: Feed) -> None:
        self._quiet = 0.0
        if self._put is None:
            self._kept.append(feed)
        else:
            self._put(feed)


class InputBuffer:
    """Buffer the worker's input of one stream: unread feeds, never more than were granted."""

    def __init__(self, stream: int, put: Callable[[FeedCredit], None]):
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
        """Yield feeds in order until the caller's `end_input`.

        Feeds that arrived before an error are yielded before it is raised.
        """
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
        """Accept a feed from the wire; ignore duplicates, record gaps and violations as errors."""
        if self._error is not None:
            return
        if feed.seq > self.received:
            self._error = StreamGap(
                f"input of stream {self._stream}: expected {self.received}, got {feed.seq}"
            )
        elif feed.seq == self.received:
            self._next(feed)
        self._arrived.set()

    def _next(self, feed: Feed) -> None:
        if feed.data and (
            self._ended or self.received >= self._granted or len(feed.data) > FEED_SIZE
        ):
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
        self._put(FeedCredit(self._stream, self._granted))
