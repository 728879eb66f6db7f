"""The sound of a turn while it is spoken: as much of it as is known to belong to the turn, for who hears it anew."""

from __future__ import annotations

import asyncio

from motet_shared.audio import duration_ms
from motet_shared.messages import FEED_SIZE
from motet_shared.stream import Stream

from .sound import Sound


class Excerpt:
    """From `start`, in ms of `sound`, which has to keep it until `finish`."""

    def __init__(self, sound: Sound, start: float):
        self.stretch = 0  # how often the speaker went on
        self._sound = sound
        self._start = self._until = max(start, sound.begin)
        self._open = True  # more will follow
        self._whole: bytes | None = None  # once it is over
        self._changed = asyncio.Event()

    @property
    def ms(self) -> float:
        """How long it is."""
        return self._until - self._start

    def lasts(self, stretch: int) -> bool:
        """Whether the speaker has not paused since he began that stretch."""
        return self._open and self.stretch == stretch

    def reach(self, until: float) -> None:
        self._until = max(self._until, until)
        self._changed.set()

    def pause(self) -> None:
        self._open = False
        self._changed.set()

    def go_on(self) -> None:
        if not self._open and self._whole is None:
            self.stretch, self._open = self.stretch + 1, True
            self._changed.set()

    def cut(self) -> None:
        """Nothing before the pause is to be heard again."""
        if self._whole is None:
            self._start = self._until

    def finish(self) -> None:
        if self._whole is None:
            self._whole = self._sound.between(self._start, self._until)
        self.pause()

    async def send_to(self, stream: Stream) -> None:
        """Send all of it from the beginning, until it pauses, and end the input."""
        sent = 0
        while True:
            if part := self._pcm(sent):
                await stream.send(part)
                sent += len(part)
            elif self._open:
                await self._change()
            else:
                await stream.end_input()
                return

    async def more(self, stretch: int) -> bool:
        """Wait until the speaker goes on after that stretch. False if the turn ended there."""
        while self.stretch == stretch:
            if self._whole is not None:
                return False
            await self._change()
        return True

    def _pcm(self, sent: int) -> bytes:
        """The next bytes, whole samples, at most what one feed takes."""
        if self._whole is not None:
            return self._whole[sent : sent + FEED_SIZE]
        rate = self._sound.rate
        at = self._start + duration_ms(sent, rate)
        return self._sound.between(at, min(self._until, at + duration_ms(FEED_SIZE, rate)))

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
