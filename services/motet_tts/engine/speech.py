"""Speak one text: its sentences pass through the engine in order and are shaped, timed and sent.

Speech can be resumed at a sentence: its noise depends on (seed, sentence, frame) and its shaping
starts afresh, so another instance computes the same samples and skips those that the client has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from msgspec.structs import replace
from torch import Tensor

from motet_media.audio import SAMPLE_BYTES
from motet_shared.errors import InternalError, MotetError
from motet_shared.messages import Audio, Generate, Speak, Usage
from motet_shared.text.sentences import Chunk, cut
from motet_shared.wire.call import Call
from motet_tts.decode_client import DecodeClient
from motet_tts.shaper import WIRE_RATE, Shaper
from motet_tts.stretch import Samples
from motet_tts.text_normalization import spoken_words
from motet_tts.timing import Pace, WordTime, distribute_words, words_from_starts

from .thread import EngineThread
from .utterance import Key, StepOutput, Utterance, VoiceSample

_MS = WIRE_RATE / 1000  # samples per millisecond


@dataclass(slots=True)
class SpeechSessions:
    """Hold the state shared by all texts.

    decode: generates the tokens of models whose language model it serves.
    queues: outputs of the engine by sentence.
    pace: of each voice.
    """

    thread: EngineThread
    decode: DecodeClient
    sample_rate: int
    rates: tuple[float, float]
    queues: dict[Key, asyncio.Queue[StepOutput]] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)

    def deliver(self, outputs: list[StepOutput]) -> None:
        """Queue all outputs of one step, on the event loop.

        Outputs of sentences that were cancelled in the meantime are dropped.
        """
        for output in outputs:
            if (queue := self.queues.get(output.key)) is not None:
                queue.put_nowait(output)


class Speech:
    """Speak one text to one caller."""

    def __init__(
        self,
        sessions: SpeechSessions,
        call: Call,
        request: Speak,
        voice: str,
        sample: VoiceSample | None = None,
    ):
        self._sessions, self._call, self._request, self._voice = sessions, call, request, voice
        self._sample = sample
        resume = request.resume
        self._done = resume.text if resume else 0  # characters
        self._samples = resume.samples if resume else 0  # of the sentences before this one
        self._skip = resume.skip if resume else 0
        self.usage = Usage()

    async def run(self) -> None:
        """Speak all remaining sentences. Raises the engine's errors."""
        for number, chunk in enumerate(cut(self._request.text, begun=self._request.sentence > 0)):
            if chunk.end <= self._done:
                continue
            words = spoken_words(chunk.text)
            index = self._request.sentence + number
            if any(spoken for _, spoken in words):
                await _Sentence(self, index, chunk, words).run()
            else:
                self._done = chunk.end
                await self._send(Audio(b"", [], index, chunk.end))

    async def _send(self, audio: Audio) -> None:
        await self._call.send(audio)


class _Sentence:
    """Speak one sentence.

    `shaper.samples` counts all samples computed of it, including those that the client already has.
    """

    def __init__(self, speech: Speech, index: int, chunk: Chunk, words: list[tuple[str, str]]):
        self._speech, self._index, self._chunk, self._words = speech, index, chunk, words
        self._sessions = speech._sessions
        slowest, fastest = self._sessions.rates
        self._model_speed = min(max(speech._request.speed, slowest), fastest)
        self._stretch = speech._request.speed / self._model_speed
        self._shaper = Shaper(self._sessions.sample_rate, self._stretch)
        self._is_unchanged = self._stretch == 1.0 and self._sessions.sample_rate == WIRE_RATE
        self._begin = speech._samples / _MS
        self._starts: tuple[int, ...] = ()
        self._unreported_words = True  # whether word times are due with the next item

    async def run(self) -> None:
        """Speak the sentence and send its items. Raises the engine's errors."""
        key = (self._speech._call.id, self._index)
        queue = self._sessions.queues[key] = asyncio.Queue()
        speech, generation = self._speech, None
        spoken = tuple(spoken for _, spoken in self._words if spoken)
        utterance = Utterance(
            words=spoken,
            voice=speech._voice,
            seed=speech._request.seed,
            index=self._index,
            speed=self._model_speed,
            sample=speech._sample,
            instructions=speech._request.instructions,
            priority=speech._request.priority,
        )
        self._sessions.thread.submit(key, utterance)
        done = False
        try:
            while not done:
                output = await queue.get()
                if output.error is not None:
                    raise output.error
                if output.generate is not None:
                    generation = asyncio.create_task(self._generate(key, output.generate))
                    generation.add_done_callback(partial(note_failure, key, queue))
                    continue
                done = output.done
                await self._handle(output)
        finally:
            del self._sessions.queues[key]
            if not done:  # the engine has the sentence still if its generation failed
                self._sessions.thread.cancel(key)
            if generation is not None:  # last: a cancel may end this wait
                generation.cancel()
                await asyncio.gather(generation, return_exceptions=True)

    async def _generate(self, key: Key, request: Generate) -> None:
        """Pass the tokens of decode on to the engine. Raises what decode raises."""
        sessions, call = self._sessions, self._speech._call
        asked = replace(request, request_id=self._speech._request.request_id)
        async with aclosing(sessions.decode.tokens(call, asked)) as batches:
            async for ids in batches:
                sessions.thread.feed(key, ids, last=False)
        sessions.thread.feed(key, (), last=True)

    async def _handle(self, output: StepOutput) -> None:
        if output.starts is not None and len(output.starts) > len(self._starts):
            self._starts, self._unreported_words = output.starts, True
        data = await self._shaped(lambda: self._shaper.push(as_samples(output.samples)))
        if output.done:
            data += await self._shaped(self._shaper.finish)
        data = self._without_received(data)
        if output.done:
            await self._end(data, output)
        elif data:
            words, self._unreported_words = (self._times() if self._unreported_words else []), False
            await self._speech._send(Audio(data, words, self._index))

    async def _shaped(self, work: Callable[[], bytes]) -> bytes:
        """Run `work`, on another thread if it stretches or resamples, which takes long."""
        return work() if self._is_unchanged else await asyncio.to_thread(work)

    def _without_received(self, data: bytes) -> bytes:
        """Remove what the client already received of this sentence from another instance."""
        speech = self._speech
        cut_off = min(speech._skip, len(data) // SAMPLE_BYTES)
        speech._skip -= cut_off
        return data[cut_off * SAMPLE_BYTES :]

    async def _end(self, data: bytes, output: StepOutput) -> None:
        """Send the last item of the sentence, with the final times of its words."""
        speech, length = self._speech, self._shaper.samples / _MS
        speech._skip = 0
        speech._samples += self._shaper.samples
        speech._done = self._chunk.end
        usage = Usage(prompt_tokens=output.tokens, completion_tokens=output.frames)
        speech.usage.prompt_tokens += usage.prompt_tokens
        speech.usage.completion_tokens += usage.completion_tokens
        self._sessions.pace.update(speech._voice, self._words, length * speech._request.speed)
        await speech._send(Audio(data, self._times(length), self._index, self._chunk.end, usage))

    def _times(self, length: float | None = None) -> list[WordTime]:
        """Return the times of its words: known starts, and estimates at the voice's pace."""
        speech = self._speech
        if not self._starts and length is not None:
            return distribute_words(self._words, self._begin, length)
        per_ms = self._sessions.sample_rate / 1000 * self._stretch
        pace = self._sessions.pace.of(speech._voice) / speech._request.speed
        starts = [start / per_ms for start in self._starts]
        return words_from_starts(self._words, starts, self._begin, letter_ms=pace, length=length)


def note_failure(key: Key, queue: asyncio.Queue[StepOutput], task: asyncio.Task[None]) -> None:
    """Queue the error of a generation that failed."""
    if task.cancelled() or (error := task.exception()) is None:
        return
    if not isinstance(error, MotetError):
        error = InternalError(f"its tokens could not be generated: {error!r}")
    queue.put_nowait(StepOutput(key, error=error))


def as_samples(samples: Tensor | None) -> Samples:
    """Return samples as an array; none for None."""
    return np.zeros(0, np.float32) if samples is None else samples.numpy()
