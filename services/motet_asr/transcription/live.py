"""Transcribe live speech repeatedly and report words as soon as two transcriptions agree.

The common beginning of two consecutive transcriptions is stable and is kept ("local agreement",
Machacek et al., 2023); the rest may change. When a window is full, transcription continues after
the last stable word.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import numpy as np

from motet_asr.engine.engine import SAMPLE_RATE, Audio
from motet_asr.engine.recognizer import Recognizer
from motet_asr.engine.request import TranscriptionOptions, Word
from motet_media.audio import Resampler
from motet_shared.errors import BadRequest

from .stitch import normalized
from .windows import is_silent

_MARGIN = 0.1  # of a full window: words this near to its end may be cut in two
_WINDOWS_AHEAD = 2  # most windows of audio that are read before it is transcribed
_SHORTEST = 0.1  # shortest audio that is transcribed, in seconds

Show = Callable[[str, str], object]


class Agreement:
    """Track the stable words of a stream; stable words are only ever appended to."""

    def __init__(self) -> None:
        self.stable: list[Word] = []
        self.unstable: list[Word] = []

    def update(self, words: list[Word]) -> None:
        """Apply a re-transcription; new words that agree with the previous one become stable."""
        rest = self._new(words)
        count = 0
        for word, previous in zip(rest, self.unstable, strict=False):
            if normalized(word.text) != normalized(previous.text):
                break
            count += 1
        self.stable += rest[:count]
        self.unstable = rest[count:]

    def finalize(self, words: list[Word], until: float) -> None:
        """Apply the last transcription of a window: its words up to `until` become stable."""
        rest = self._new(words)
        self.stable += [word for word in rest if word.end <= until]
        self.unstable = []

    def finish(self) -> None:
        """Mark the rest as stable, at the end of the input."""
        self.stable, self.unstable = self.stable + self.unstable, []

    def _new(self, words: list[Word]) -> list[Word]:
        """Return the words after the last stable one, by time.

        Counting does not work: a re-transcription may have other words before it.
        """
        if not self.stable:
            return words
        last = self.stable[-1].end
        return [word for word in words if (word.start + word.end) / 2 > last]

    @property
    def stable_text(self) -> str:
        return "".join(word.text for word in self.stable)

    @property
    def unstable_text(self) -> str:
        return "".join(word.text for word in self.unstable)


class LiveTranscription:
    """Transcribe one live stream, again and again while it lasts.

    every: seconds of new audio between transcriptions.
    longest: limit of the whole stream, in seconds.
    """

    def __init__(
        self,
        recognizer: Recognizer,
        options: TranscriptionOptions,
        rate: int,
        every: float,
        longest: float,
    ):
        self._recognizer, self._options = recognizer, options
        self._every, self._longest = every, longest
        self._resampler = Resampler(rate, SAMPLE_RATE)
        self._audio: Audio = np.zeros(0, np.float32)  # from `_offset` on
        self._offset = 0.0  # seconds that are settled and not transcribed again
        self._transcribed_until = 0.0
        self._ended = False
        self._most = _WINDOWS_AHEAD * int(recognizer.family.window * SAMPLE_RATE)  # samples
        self._audio_arrived, self._audio_dropped = asyncio.Event(), asyncio.Event()
        self.agreement = Agreement()

    @property
    def seconds(self) -> float:
        """Return how many seconds have been received."""
        return self._offset + len(self._audio) / SAMPLE_RATE

    async def run(self, pcm: AsyncIterator[bytes], show: Show) -> list[Word]:
        """Return all words when the input has ended.

        `show` receives the stable text and the unstable rest after each transcription. Raises
        BadRequest (param `audio`) if the stream exceeds `longest`.
        """
        reader = asyncio.create_task(self._read(pcm))
        try:
            while await self._wait_for_audio(reader):
                await self._transcribe(show)
            self.agreement.finish()
            return self.agreement.stable
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, pcm: AsyncIterator[bytes]) -> None:
        try:
            async for data in pcm:
                self._append(self._resampler.feed(data))
                while len(self._audio) > self._most:
                    self._audio_dropped.clear()
                    await self._audio_dropped.wait()
                await asyncio.sleep(0)  # what has arrived already would hold up the loop
            self._append(self._resampler.flush())
        finally:
            self._ended = True
            self._audio_arrived.set()

    def _append(self, pcm: bytes) -> None:
        samples = np.frombuffer(pcm, "<i2").astype(np.float32) / 32768
        self._audio = np.concatenate([self._audio, samples])
        if self.seconds > self._longest:
            raise BadRequest(
                f"the live stream is longer than {self._longest:g} s (max_audio)", param="audio"
            )
        self._audio_arrived.set()

    async def _wait_for_audio(self, reader: asyncio.Task[None]) -> bool:
        """Wait for audio to transcribe; return False when no untranscribed speech is left."""
        while not self._ended and self.seconds - self._transcribed_until < self._every:
            self._audio_arrived.clear()
            await self._audio_arrived.wait()
        if self._ended and reader.done():
            reader.result()
        return not self._ended or not is_silent(self._fresh())

    def _fresh(self) -> Audio:
        """Return the audio received since the last transcription."""
        return self._audio[round((self._transcribed_until - self._offset) * SAMPLE_RATE) :]

    async def _transcribe(self, show: Show) -> None:
        window = self._recognizer.family.window
        count = min(len(self._audio), int(window * SAMPLE_RATE))
        chunk, full = self._audio[:count], count == int(window * SAMPLE_RATE)
        until = self._offset + count / SAMPLE_RATE
        last = self._ended and count == len(self._audio)
        words = await self._words(chunk)
        self._transcribed_until = until
        if last:
            self.agreement.finalize(words, float("inf"))
        elif full:
            self.agreement.finalize(words, until - window * _MARGIN)
            self._drop_audio(until - window * _MARGIN)
        else:
            self.agreement.update(words)
        show(self.agreement.stable_text, self.agreement.unstable_text)

    async def _words(self, chunk: Audio) -> list[Word]:
        """Return the words of the next window; times count from the start of the stream."""
        if len(chunk) < _SHORTEST * SAMPLE_RATE or is_silent(chunk):
            return []
        result, segments = await self._recognizer.transcribe(chunk, self._options)
        if result.language and not self._options.language and self.agreement.stable:
            self._options = replace(self._options, language=result.language)
        return [word.moved(self._offset) for segment in segments for word in segment.words]

    def _drop_audio(self, until: float) -> None:
        """Continue after the last stable word, or at `until` if no speech was found before it."""
        stable = self.agreement.stable
        keep_from = max(self._offset, stable[-1].end if stable else 0.0)
        if keep_from <= self._offset or not stable:
            keep_from = until
        self._audio = self._audio[round((keep_from - self._offset) * SAMPLE_RATE) :]
        self._offset = keep_from
        self._transcribed_until = keep_from
        self._audio_dropped.set()
