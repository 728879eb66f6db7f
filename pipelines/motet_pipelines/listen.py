"""Listen: sound in as it is heard, the edges of speech out, on whichever voice activity service is alive.

    sound = Sound(24000)
    async with aclosing(listen(bus, Detect(sample_rate=24000), sound)) as edges:
        async for edge in edges:                # meanwhile somebody calls `await sound.hear(pcm)`
            if edge.kind == "stop":
                turn = sound.between(started, edge.ms)

If the service dies, another one hears what is still of interest again: the turn that is being spoken, or the last
moments of the pause. No turn is told twice. Leaving the generator early is a remote cancel; `aclosing` makes it prompt.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from motet_shared.audio import duration_ms, pcm_bytes
from motet_shared.bus import Bus
from motet_shared.errors import Overloaded, StreamBroken, Unavailable
from motet_shared.messages import FEED_SIZE, FEED_WINDOW, Detect, SpeechEdge
from motet_shared.stream import Stream

from .instances import pick

ROLE, MODEL = "vad", "silero-vad"
BEHIND = 2 * 2**20  # bytes that may wait to be sent: who sends faster than they are heard has to wait
LONGEST_PADDING = 3000  # ms of a pause that are kept: a turn may begin before its first sound
KEPT_MS = 1000  # before a turn, so that another instance finds its start too
LASTED = 1.0  # seconds after which a stream that breaks had been working
PAUSE = 0.05  # seconds between two attempts


class Sound:
    """PCM by its place in time, in ms. It begins at `origin`; what is forgotten stays counted."""

    def __init__(self, rate: int, origin: float = 0.0):
        self.rate = rate
        self.hold: float | None = None  # ms from which all has to stay: a turn is being spoken
        self.done = origin  # ms up to which all turns are over
        self._origin = origin
        self._data = bytearray()
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
        """Add the next sound; waits while a listener is too far behind."""
        self._data += pcm
        self._wake()
        while self._listened and self._first + len(self._data) - self._sent > BEHIND:
            await self._change()

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
            over = max(self.done, worked - LONGEST_PADDING) if self.hold is None else self.hold
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


async def listen(
    bus: Bus, request: Detect, sound: Sound, *, patience: float = 5.0, epoch: int = 0
) -> AsyncGenerator[SpeechEdge, None]:
    """Yield the edges of speech, in times of `sound`, and have it forget what can no longer be part of a turn.

    `patience`: seconds in which a service may appear or restart before the last retryable error is raised.
    """
    turn, now, instance = _Turn(sound), bus.clock.now, None
    began = now()
    give_up = began + patience
    while True:
        try:
            instance = await pick(bus, ROLE, request.model or MODEL, avoid=instance, patience=give_up - now())
            began = now()
            async with bus.open(ROLE, request, instance=instance, epoch=epoch) as stream:
                base = sound.begin
                sending = asyncio.create_task(sound.send_to(stream), name="listen")
                try:
                    async for edge in stream:
                        if isinstance(edge, SpeechEdge) and (told := turn.take(edge, base)) is not None:
                            yield told
                            turn.settle(told)
                finally:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
                return
        except (StreamBroken, Unavailable, Overloaded) as error:
            if isinstance(error, StreamBroken) and now() - began > LASTED:
                give_up = now() + patience
            if now() >= give_up:
                raise
        await bus.clock.sleep(PAUSE)


class _Turn:
    """What was told so far: an instance that takes over hears, and tells, some of it again."""

    def __init__(self, sound: Sound):
        self._sound = sound
        self._speaking = False

    def take(self, edge: SpeechEdge, base: float) -> SpeechEdge | None:
        """The edge in times of the sound; None if it is known."""
        ms, speech_ms, heard_ms = (round(base + time) for time in (edge.ms, edge.speech_ms, edge.heard_ms))
        moved = SpeechEdge(edge.kind, ms, speech_ms, heard_ms)
        if edge.kind == "idle":
            return moved
        starts = edge.kind == "start"
        if starts == self._speaking:
            return None
        self._speaking = starts
        if starts:
            self._sound.hold = moved.ms - KEPT_MS
        return moved

    def settle(self, told: SpeechEdge) -> None:
        """Who was told of the end of a turn has taken its sound."""
        if told.kind == "stop":
            self._sound.hold, self._sound.done = None, max(self._sound.done, told.ms)
