"""Serve role `asr`: operations `transcribe` (files) and `listen` (live streams).

The engine runs on its own thread; files are fetched as blobs and decoded on other threads. All
resources of a call are freed within one engine step after its caller cancels.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from motet_asr.engine.engine import SAMPLE_RATE
from motet_asr.engine.recognizer import Recognizer
from motet_asr.engine.request import TimedSegment, TranscriptionOptions, Word
from motet_asr.transcription.audio_memory import AudioMemory
from motet_asr.transcription.live import LiveTranscription
from motet_asr.transcription.streaming import StreamedTranscription
from motet_asr.transcription.transcription import FinalWindow, Transcription
from motet_asr.transcription.windows import mark_by_level, mark_spans
from motet_kernels.runtime.device import readings
from motet_shared.blobs.store import BlobStore
from motet_shared.messages import (
    Listen,
    ModelCard,
    Partial,
    Recording,
    Segment,
    Transcribe,
    TranscriptionResume,
    Usage,
)
from motet_shared.process.actor import Actor, operation
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call

from .checkpoint import load_engine
from .config import AsrConfig

log = logging.getLogger(__name__)


class Asr(Actor):
    """Serve one speech recognition model."""

    role = "asr"
    config: AsrConfig

    def __init__(self, config: AsrConfig, bus: Bus):
        super().__init__(config, bus)
        self.max_active = config.max_files
        self._store = BlobStore.of(config, bus)
        self._memory = AudioMemory(config.audio_memory)
        self._recognizer: Recognizer | None = None
        self._card: ModelCard | None = None

    async def warm(self) -> None:
        engine_config = self.config.engine()
        engine = await asyncio.to_thread(load_engine, engine_config)
        await self._store.start()
        self._recognizer = Recognizer(engine, self.crash)
        created = int((Path(self.config.model) / "config.json").stat().st_mtime)
        name, vocab, live = engine_config.model_name, engine.family.vocab, self.config.live
        self._card = ModelCard(
            name=name,
            context=0,
            created=created,
            vocab_size=vocab,
            live=live,
            accepts_prompt=engine.family.prompts,
        )
        self.bus.monitor.duties.append(self.recognizer.thread.watch(self.config.step_timeout))
        log.info("model loaded", extra={"model": self._card.name, "window": engine.family.window})

    async def close(self) -> None:
        if self._recognizer is not None:
            await self._recognizer.close()
        await self._store.close()

    @property
    def recognizer(self) -> Recognizer:
        """Return the recognizer. Raises RuntimeError before `warm` has loaded it."""
        if self._recognizer is None:
            raise RuntimeError("the model is not loaded yet")
        return self._recognizer

    # ----------------------------------------------------------------------------------- operations
    @operation(Transcribe)
    async def transcribe(self, call: Call, request: Transcribe) -> None:
        """Send a `Recording`, then the segments of a file in order, each when it is final."""
        self.check_served(request.model)
        options = self._options(request.language, request.prompt, request.words)
        options = replace(
            options, task=request.task, temperature=request.temperature, seed=_seed(request)
        )
        self.recognizer.family.check(options)
        if request.words:
            self.recognizer.family.check_words()
        speech = mark_by_level if request.speech is None else mark_spans(request.speech)
        resume = request.resume or TranscriptionResume(window=0, segment=0, skip=0)
        if resume.language:
            options = replace(options, language=resume.language)
        data = await self._store.get(request.audio)
        async with self._memory.reading(data, self.config.max_audio) as audio:
            del data
            transcription = Transcription(
                self.recognizer,
                audio,
                options,
                parallel=self.config.parallel,
                first=resume.window,
                speech=speech,
            )
            writer = _TranscriptWriter(
                call, resume, len(audio) / SAMPLE_RATE, self.recognizer, request
            )
            async with aclosing(transcription.final_windows()) as windows:
                async for window in windows:
                    await writer.write(window)
            await writer.finish()

    @operation(Listen)
    async def listen(self, call: Call, request: Listen) -> None:
        """Send partials of a live stream while it lasts; one segment when its input has ended."""
        self.check_served(request.model)
        options = replace(self._options(request.language, request.prompt, True), timestamps=False)
        self.recognizer.family.check(options)
        if request.words:
            self.recognizer.family.check_words()
        live = self._live(options, request.sample_rate)

        def push_partial(stable: str, tail: str) -> None:
            if (
                call.credit_left > 1
            ):  # reserve one credit for the segment; late partials are dropped
                call.push(Partial(stable, tail))

        words = await live.run(call.received(), push_partial)
        text = "".join(word.text for word in words)
        start, end = (words[0].start, words[-1].end) if words else (0.0, live.seconds)
        await call.send(
            Segment(0, 0, start, end, text, words=_word_times(words) if request.words else [])
        )
        call.finish("stop", Usage())

    def _live(
        self, options: TranscriptionOptions, rate: int
    ) -> LiveTranscription | StreamedTranscription:
        if self.recognizer.family.streams:
            return StreamedTranscription(self.recognizer, options, rate, self.config.max_audio)
        return LiveTranscription(
            self.recognizer, options, rate, self.config.partial_every, self.config.max_audio
        )

    def _options(self, language: str, prompt: str, words: bool) -> TranscriptionOptions:
        code = self.recognizer.family.code(language)
        return TranscriptionOptions(
            language=code, prompt=prompt, words=words, timestamps=self.config.timestamps
        )

    # --------------------------------------------------------------------------------------- health
    def load(self) -> dict[str, float]:
        if self._recognizer is None:
            return {}
        stats = self._recognizer.thread.stats()
        waiting = stats["waiting"] + stats["commands"]
        return {
            "running": stats["running"],
            "queued": waiting,
            "batch": stats["batch_size"],
            "seconds": stats["audio_seconds"],
            "engine_busy": self._recognizer.thread.busy_seconds,
            **readings(),
        }

    def models(self) -> list[ModelCard]:
        return [self._card] if self._card else []

    def stats(self) -> dict[str, Any]:
        """Return numbers, which become metrics, and strings that describe the loaded model."""
        if self._recognizer is None:
            return {}
        numbers = {
            **self._recognizer.thread.stats(),
            **self._store.stats(),
            "audio_bytes": self._memory.held,
        }
        return {**numbers, **self._recognizer.family.describe()}

    def check_integrity(self) -> None:
        """Raise RuntimeError if an idle actor still holds engine work or decoded audio."""
        super().check_integrity()
        engine = self.recognizer.thread.engine
        engine.check_integrity()
        if not self.bus.calls.active and engine.has_work:
            raise RuntimeError("no call is active, but the engine has work")
        if not self.bus.calls.active and self._memory.held:
            raise RuntimeError(
                f"no call is active, but {self._memory.held} bytes of decoded audio are held"
            )


class _TranscriptWriter:
    """Send the items of one file, skipping those that the client already has."""

    def __init__(
        self,
        call: Call,
        resume: TranscriptionResume,
        duration: float,
        recognizer: Recognizer,
        request: Transcribe,
    ):
        self._call, self._resume, self._duration = call, resume, duration
        self._recognizer = recognizer
        self._words, self._scores = request.words, request.logprobs
        self._next = resume.segment
        self._skip = resume.skip
        self._recording_sent = resume.window > 0 or resume.skip > 0
        self._tokens = 0
        self._latest = 0.0  # start of the last segment; segment starts never decrease

    async def write(self, window: FinalWindow) -> None:
        """Send the segments of a window that the client does not have yet."""
        if not window.segments:
            return
        await self._send_recording(window.language)
        for segment in window.segments:
            self._tokens += len(segment.tokens)
            if self._skip:
                self._skip -= 1
            else:
                await self._call.send(self._segment(segment, window))
            self._next += 1

    def _segment(self, segment: TimedSegment, window: FinalWindow) -> Segment:
        self._latest = start = max(self._latest, segment.start)
        return Segment(
            self._next,
            window.window.index,
            round(start, 3),
            round(max(start, segment.end), 3),
            segment.text,
            segment.tokens,
            _word_times(segment.words) if self._words else [],
            segment.avg_logprob,
            segment.no_speech_prob,
            segment.temperature,
            segment.compression_ratio,
            window.window.start,
            scored(segment, self._recognizer.family.text_of) if self._scores else [],
        )

    async def _send_recording(self, language: str) -> None:
        """Send the `Recording` once, before the first segment."""
        if not self._recording_sent:
            self._recording_sent = True
            name = self._recognizer.family.language_name(language)
            await self._call.send(Recording(self._duration, language, name))

    async def finish(self) -> None:
        """Send the `Recording` if no segment did, and end the call."""
        await self._send_recording("")
        self._call.finish("stop", Usage(completion_tokens=self._tokens))


def scored(segment: TimedSegment, text_of: Callable[[list[int]], str]) -> list[tuple[str, float]]:
    """Return the text that each token adds to a segment, with the token's log-probability.

    Tokens that add no text are left out: a character of several tokens belongs to the token that
    completes it.
    """
    found, known = [], ""
    for index, logprob in enumerate(segment.logprobs, 1):
        text = text_of(segment.tokens[:index])
        if text.endswith("\ufffd") and index < len(segment.logprobs):
            text = known
        found.append((text[len(known) :], logprob))
        known = text
    return [entry for entry in found if entry[0]]


def _word_times(words: list[Word]) -> list[tuple[str, float, float]]:
    return [(word.text, round(word.start, 3), round(word.end, 3)) for word in words]


def _seed(request: Transcribe) -> int:
    """Return the seed of a file's sampling noise.

    At temperature 0 the fallbacks draw with a fixed seed, so that a file has one transcript.
    """
    return request.seed if request.temperature > 0 else 0
