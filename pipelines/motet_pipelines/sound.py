"""Sound by its place in time: what was said so far, for those who listen while more of it comes.

    sound = Sound(24000)
    await sound.hear(pcm)                       # as it comes
    sound.hold(start)                           # a turn begins: nothing after this is forgotten
    turn = sound.between(start, end)
    sound.settle(end)                           # it is over

Times are in ms of all the sound that there was.
"""

from __future__ import annotations

import asyncio
from collections import deque

from motet_shared.audio import SAMPLE_BYTES, duration_ms, pcm_bytes
from motet_shared.messages import FEED_SIZE, FEED_WINDOW
from motet_shared.stream import Stream

BEHIND = 2 * 2**20  # bytes that may wait to be sent: who sends faster than they are heard has to wait
LONGEST_PADDING = 3000  # ms of a pause that are kept: a turn may begin before its first sound
KEPT_MS = 1000  # before a turn, so that another instance finds its start too


class Sound:
    """PCM by its place in time, in ms. It begins at `origin`; what is forgotten stays counted."""

    def __init__(self, rate: int, origin: float = 0.0):
        self.rate = rate
        self.done = origin  # ms up to which all turns are over
        self._held: float | None = None  # ms from which all has to stay: a turn is being spoken
        self._origin = origin
        self._data = bytearray()  # whole samples
        self._torn = b""  # the first half of the next one
        self._first = 0  # bytes that are forgotten
        self._sent = 0  # bytes that a listener has taken, those that are forgotten included
        # Where the last feeds begin: what was sent before them has been worked through, or they had no credit.
        self._sending: deque[int] = deque(maxlen=FEED_WINDOW + 2)
        self._listened = False
        self._ended = False
        self._changed = asyncio.Event()

    @property
    def now(self) -> float:
        """How far it goes, in ms."""
        return self._ms(self._first + len(self._data))

    @property
    def begin(self) -> float:
        """Where what is kept begins, in ms."""
        return self._ms(self._first)

    def __len__(self) -> int:
        """Bytes that are kept."""
        return len(self._data)

    async def hear(self, pcm: bytes) -> None:
        """Add the next sound, cut anywhere; waits while a listener is too far behind."""
        whole = self._torn + pcm
        end = len(whole) - len(whole) % SAMPLE_BYTES
        self._data += whole[:end]
        self._torn = whole[end:]
        self._wake()
        while self._listened and self._first + len(self._data) - self._sent > BEHIND:
            await self._change()

    def tear_off(self) -> None:
        """What is heard next begins with a whole sample, though the last one was not."""
        self._torn = b""

    def end(self) -> None:
        """Nothing more will be heard."""
        self._ended = True
        self._wake()

    def between(self, start: float, end: float) -> bytes:
        """What was heard from `start` to `end`, in ms; without what is forgotten."""
        first, last = (max(0, self._bytes(ms) - self._first) for ms in (start, end))
        return bytes(self._data[first:last])

    def forget(self, until: float) -> None:
        """Drop what was heard before `until`, in ms."""
        count = min(self._bytes(until) - self._first, len(self._data))
        if count > 0:
            del self._data[:count]
            self._first += count
            self._sent = max(self._sent, self._first)

    def hold(self, start: float) -> None:
        """A turn begins at `start`, in ms: all of it stays, and a little before it."""
        self._held = start - KEPT_MS

    def settle(self, until: float) -> None:
        """What was heard before `until`, in ms, is part of no turn any more."""
        self._held, self.done = None, max(self.done, until)

    async def send_to(self, stream: Stream) -> None:
        """Send all that is kept and all that follows, until the sound or the stream ends."""
        self._sent, self._listened = self._first, True
        self._sending.clear()
        try:
            while True:
                at = self._sent - self._first
                if part := bytes(self._data[at : at + FEED_SIZE]):
                    self._sending.append(self._sent)
                    self._sent += len(part)
                    await stream.send(part)
                    self._forget_old()
                    self._wake()
                elif self._ended:
                    await stream.end_input()
                    return
                else:
                    await self._change()
        finally:
            self._listened = False
            self._wake()

    def _forget_old(self) -> None:
        """While nobody speaks, only the last moments may become part of a turn."""
        if len(self._sending) == self._sending.maxlen:
            worked = self._ms(self._sending[0])
            over = max(self.done, worked - LONGEST_PADDING) if self._held is None else self._held
            self.forget(min(over, worked))

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()

    def _ms(self, count: int) -> float:
        return self._origin + duration_ms(count, self.rate)

    def _bytes(self, ms: float) -> int:
        return pcm_bytes(max(0.0, ms - self._origin), self.rate)
