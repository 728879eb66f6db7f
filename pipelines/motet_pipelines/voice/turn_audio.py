"""Hold the audio of a turn while it is spoken, as far as it is known to belong to the turn."""

from __future__ import annotations

import asyncio

from motet_media.audio import duration_ms
from motet_shared.messages import FEED_SIZE
from motet_shared.wire.stream import Stream

from .audio_buffer import AudioBuffer


class TurnAudio:
    """Represent the audio from `start`, in ms of `audio`, which has to keep it until `finish`."""

    def __init__(self, audio: AudioBuffer, start: float):
        self.resumes = 0  # how often the speaker resumed after a pause
        self._audio = audio
        self._start = self._until = max(start, audio.begin)
        self._open = True  # more audio will follow
        self._whole: bytes | None = None  # PCM of the turn once it is over
        self._changed = asyncio.Event()

    @property
    def start(self) -> float:
        """Return where it begins, in ms."""
        return self._start

    @property
    def ms(self) -> float:
        """Return its length in ms."""
        return self._until - self._start

    def is_current(self, resumes: int) -> bool:
        """Return True if the speaker has not paused since the last resume."""
        return self._open and self.resumes == resumes

    def reach(self, until: float) -> None:
        self._until = max(self._until, until)
        self._changed.set()

    def pause(self) -> None:
        self._open = False
        self._changed.set()

    def resume(self) -> None:
        if not self._open and self._whole is None:
            self.resumes, self._open = self.resumes + 1, True
            self._changed.set()

    def cut(self) -> None:
        """Exclude everything before the pause from re-transcription."""
        if self._whole is None:
            self._start = self._until

    def finish(self) -> None:
        if self._whole is None:
            self._whole = self._audio.between(self._start, self._until)
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

    async def more(self, resumes: int) -> bool:
        """Wait until the speaker resumes after the pause number `resumes`. Return False if the turn ended there."""
        while self.resumes == resumes:
            if self._whole is not None:
                return False
            await self._change()
        return True

    def _pcm(self, sent: int) -> bytes:
        """Return the next bytes: whole samples, at most FEED_SIZE."""
        if self._whole is not None:
            return self._whole[sent : sent + FEED_SIZE]
        rate = self._audio.rate
        at = self._start + duration_ms(sent, rate)
        return self._audio.between(at, min(self._until, at + duration_ms(FEED_SIZE, rate)))

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
