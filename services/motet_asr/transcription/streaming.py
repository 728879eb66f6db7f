"""Transcribe live speech with a model that streams: each chunk is heard once, as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import numpy as np

from motet_asr.engine.audio_stream import AudioStream, StreamChunk
from motet_asr.engine.recognizer import Recognizer
from motet_asr.engine.request import TranscriptionOptions, Word
from motet_media.audio import Resampler
from motet_shared.errors import BadRequest

Show = Callable[[str, str], object]


class StreamedTranscription:
    """Transcribe one live stream without hearing anything twice.

    longest: limit of the whole stream, in seconds.
    """

    def __init__(
        self, recognizer: Recognizer, options: TranscriptionOptions, rate: int, longest: float
    ):
        self._recognizer, self._options, self._longest = recognizer, options, longest
        self._rate = recognizer.family.stream_rate
        self._resampler = Resampler(rate, self._rate)
        self._stream: AudioStream = recognizer.family.open_stream()
        self._samples = 0

    @property
    def seconds(self) -> float:
        """Return how many seconds have been received."""
        return self._samples / self._rate

    async def run(self, pcm: AsyncIterator[bytes], show: Show) -> list[Word]:
        """Return all words when the input has ended.

        `show` receives the text of the words that are complete, and the last one, which may grow.
        Raises BadRequest (param `audio`) if the stream exceeds `longest`.
        """
        async for data in pcm:
            await self._hear(self._resampler.feed(data), show)
        await self._hear(self._resampler.flush(), show)
        for chunk in await asyncio.to_thread(self._stream.finish):
            await self._transcribe(chunk)
        return self._stream.words

    async def _hear(self, pcm: bytes, show: Show) -> None:
        samples = np.frombuffer(pcm, "<i2").astype(np.float32) / 32768
        self._samples += len(samples)
        if self.seconds > self._longest:
            raise BadRequest(
                f"the live stream is longer than {self._longest:g} s (max_audio)", param="audio"
            )
        for chunk in await asyncio.to_thread(self._stream.feed, samples):
            await self._transcribe(chunk)
            words = self._stream.words
            show("".join(word.text for word in words[:-1]), words[-1].text if words else "")

    async def _transcribe(self, chunk: StreamChunk) -> None:
        result = await self._recognizer.submit(chunk, chunk.seconds, self._options)
        self._stream.hear(result)
