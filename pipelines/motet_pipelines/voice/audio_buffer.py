"""Buffer the audio of a session by its position in time, for readers that follow it live.

    audio = AudioBuffer(24000)
    await audio.append(pcm)                       # append audio as it arrives
    audio.hold(start)                           # a turn begins: keep everything from here
    turn = audio.between(start, end)
    audio.release(end)                           # the turn is over

Times are in ms since the first audio of the session.
"""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from motet_media.audio import SAMPLE_BYTES, duration_ms, pcm_bytes
from motet_shared.messages import FEED_SIZE, FEED_WINDOW
from motet_shared.wire.stream import Stream

# Bytes that may wait to be sent; `append` blocks beyond that, so a fast sender is slowed down.
MAX_UNSENT = 2 * 2**20
LONGEST_PADDING = 3000  # ms of a pause that are kept, as a turn may begin before its speech
KEPT_MS = 1000  # ms kept before a turn, so that a second instance detects its start too


class AudioState(msgspec.Struct, frozen=True):
    """The audio of an `AudioBuffer` between turns; first: bytes forgotten, times in ms."""

    rate: int
    origin: float
    first: int
    data: bytes
    partial: bytes
    done: float


class AudioBuffer:
    """Hold PCM by its position in ms.

    It begins at `origin`; forgotten audio still counts in positions.
    """

    def __init__(self, rate: int, origin: float = 0.0):
        self.rate = rate
        self.done = origin  # ms up to which all turns are over
        self._held: float | None = None  # ms from which audio must stay, during a turn
        self._origin = origin
        self._data = bytearray()  # whole samples
        self._partial = b""  # first half of the next sample
        self._first = 0  # bytes forgotten
        self._sent = 0  # bytes sent to the listener, forgotten ones included
        # Offsets of the last feeds. All bytes before the oldest have been processed, or the
        # listener would not have granted credit for the later feeds.
        self._sending: deque[int] = deque(maxlen=FEED_WINDOW + 2)
        self._listened = False
        self._ended = False
        self._changed = asyncio.Event()

    def state(self) -> AudioState:
        return AudioState(
            self.rate, self._origin, self._first, bytes(self._data), self._partial, self.done
        )

    @classmethod
    def restored(cls, state: AudioState) -> AudioBuffer:
        made = cls(state.rate, state.origin)
        made._first = made._sent = state.first
        made._data += state.data
        made._partial, made.done = state.partial, state.done
        return made

    @property
    def is_held(self) -> bool:
        """Return True during a turn, whether it is reported or not."""
        return self._held is not None

    @property
    def now(self) -> float:
        """Return the end of the audio, in ms."""
        return self._ms(self._first + len(self._data))

    @property
    def begin(self) -> float:
        """Return the beginning of the kept audio, in ms."""
        return self._ms(self._first)

    def __len__(self) -> int:
        """Return the number of kept bytes."""
        return len(self._data)

    async def append(self, pcm: bytes) -> None:
        """Append PCM, cut at any byte; wait while the listener is more than BEHIND bytes behind."""
        whole = self._partial + pcm
        end = len(whole) - len(whole) % SAMPLE_BYTES
        self._data += whole[:end]
        self._partial = whole[end:]
        self._wake()
        while self._listened and self._first + len(self._data) - self._sent > MAX_UNSENT:
            await self._change()

    def drop_partial_sample(self) -> None:
        """Drop an incomplete last sample, so that the next PCM begins with a whole one."""
        self._partial = b""

    def end(self) -> None:
        """Mark the end of the audio."""
        self._ended = True
        self._wake()

    def between(self, start: float, end: float) -> bytes:
        """Return the PCM from `start` to `end`, in ms, without what is forgotten."""
        first, last = (max(0, self._bytes(ms) - self._first) for ms in (start, end))
        return bytes(self._data[first:last])

    def forget(self, until: float) -> None:
        """Drop the audio before `until`, in ms."""
        count = min(self._bytes(until) - self._first, len(self._data))
        if count > 0:
            del self._data[:count]
            self._first += count
            self._sent = max(self._sent, self._first)

    def hold(self, start: float) -> None:
        """Begin a turn at `start`, in ms: keep all audio from KEPT_MS before it."""
        self._held = start - KEPT_MS

    def release(self, until: float) -> None:
        """End the turn: audio before `until`, in ms, belongs to no turn any more."""
        self._held, self.done = None, max(self.done, until)

    async def send_to(self, stream: Stream) -> None:
        """Send all kept audio and all that follows, until the audio or the stream ends."""
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
        """Drop processed audio; between turns, keep LONGEST_PADDING ms, as they may begin one."""
        if len(self._sending) == self._sending.maxlen:
            self.processed(self._ms(self._sending[0]))

    def processed(self, until: float) -> None:
        """Drop the audio before `until`, in ms, as far as no turn may need it."""
        limit = max(self.done, until - LONGEST_PADDING) if self._held is None else self._held
        self.forget(min(limit, until))

    def drop_done(self) -> None:
        """Drop the sent audio that belongs to no turn any more, before more is sent.

        Without a listener nothing is dropped: the next one begins with what is kept then.
        """
        if self._listened:
            limit = self.done if self._held is None else self._held
            self.forget(min(limit, self._ms(self._sent)))

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()

    def _ms(self, count: int) -> float:
        return self._origin + duration_ms(count, self.rate)

    def _bytes(self, ms: float) -> int:
        return pcm_bytes(max(0.0, ms - self._origin), self.rate)
