"""Serve role `vad`: speech edges live (`detect`) and in files (`find_speech`), and ends of turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import numpy as np

from motet_media.audio import Resampler
from motet_media.pool import SIZE
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import UnknownModel
from motet_shared.messages import (
    Detect,
    FindSpeech,
    ModelCard,
    PredictTurnEnd,
    SpeechEdge,
    SpeechSpans,
    TurnEnd,
)
from motet_shared.process.actor import Actor, operation
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call

from .batcher import Batcher
from .config import VadConfig
from .edges import Edges
from .model import FRAME, FRAME_MS, RATE, Floats, Silero, StreamState
from .recording import probabilities
from .turns import TurnModel


class Vad(Actor):
    """Detect speech for many sessions at once, each with its own state."""

    role = "vad"
    drain_timeout = (
        1.0  # sessions last for hours: they fail over to another instance instead of ending first
    )

    def __init__(self, config: VadConfig, bus: Bus):
        super().__init__(config, bus)
        self.max_active = config.max_active
        self._batcher: Batcher | None = None
        self._turns: TurnModel | None = None
        self._store = BlobStore.of(config, bus)
        # Files hold a child between their blocks: threads must not wait for one of another's.
        self._files = asyncio.Semaphore(min(config.max_files, SIZE))
        self._task: asyncio.Task[None] | None = None

    async def warm(self) -> None:
        if self.config.turns:
            self._turns = TurnModel.load(self.config.turns)
            self._turns.end_probability("a word")
        await self._store.start()
        model = await asyncio.to_thread(Silero, self.config.model, self.config.threads)
        self._batcher = Batcher(model, self.config.max_batch)
        self._task = asyncio.create_task(self._batcher.run(), name="vad")
        self._task.add_done_callback(self._computed)
        await self.batcher.probabilities(StreamState(), [np.zeros(FRAME, np.float32)])

    def _computed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.crash(error)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._batcher is not None:
            self._batcher.close()
        await self._store.close()

    @property
    def batcher(self) -> Batcher:
        """Return the batcher. Raises RuntimeError before `warm` has loaded the model."""
        if self._batcher is None:
            raise RuntimeError("the model is not loaded yet")
        return self._batcher

    @operation(Detect)
    async def detect(self, call: Call, request: Detect) -> None:
        """Send the edges of one session's speech as they are detected, until its input ends."""
        _check_model(request.model)
        edges, stream_state, heard_ms = Edges(request), StreamState(), 0
        async for frames in self._frames(call, request.sample_rate):
            for probability in await self.batcher.probabilities(stream_state, frames):
                heard_ms += FRAME_MS
                if (edge := edges.frame(probability, heard_ms - FRAME_MS, heard_ms)) is not None:
                    await call.send(edge)
        if (last := edges.finish(heard_ms)) is not None:
            await call.send(last)
        call.finish("stop")

    @operation(FindSpeech)
    async def find_speech(self, call: Call, request: FindSpeech) -> None:
        """Send where a file has speech; its stretches share forward passes with live sessions."""
        _check_model(request.model)
        edges, heard_ms = Edges(_detection(request)), 0
        found: list[SpeechEdge] = []
        async with self._files:
            data = await self._store.get(request.audio)
            async with aclosing(probabilities(self.batcher, data, self.config.max_audio)) as blocks:
                async for block in blocks:
                    for probability in block:
                        heard_ms += FRAME_MS
                        if (
                            edge := edges.frame(probability, heard_ms - FRAME_MS, heard_ms)
                        ) is not None:
                            found.append(edge)
        if (last := edges.finish(heard_ms)) is not None:
            found.append(last)
        await call.send(SpeechSpans(_spans(found), heard_ms / 1000))
        call.finish("stop")

    @operation(PredictTurnEnd)
    async def predict_turn_end(self, call: Call, request: PredictTurnEnd) -> None:
        """Send the probability that a turn has ended, from the words alone, without delay."""
        if self._turns is None or request.model not in ("", self._turns.name):
            served = self._turns.name if self._turns else "none"
            raise UnknownModel(
                f"model: {request.model or 'an end-of-turn model'!r} is not served, {served} is; start it with --turns",
                param="model",
            )
        await call.send(TurnEnd(self._turns.end_probability(request.text)))
        call.finish("stop")

    async def _frames(self, call: Call, rate: int) -> AsyncIterator[list[Floats]]:
        """Yield the frames that each input chunk completes; the last one is padded with silence."""
        resampler, rest = Resampler(rate, RATE), b""
        async for data in call.received():
            rest += resampler.feed(data)
            whole = len(rest) - len(rest) % (2 * FRAME)
            if whole:
                yield _floats(rest[:whole])
                rest = rest[whole:]
        rest += resampler.flush()
        if rest:
            yield _floats(rest + b"\x00" * (-len(rest) % (2 * FRAME)))

    def models(self) -> list[ModelCard]:
        names = [Silero.name] if self._batcher else []
        return [
            ModelCard(name=name, context=0)
            for name in [*names, *([self._turns.name] if self._turns else [])]
        ]

    def stats(self) -> dict[str, Any]:
        return {} if self._batcher is None else asdict(self._batcher.counters)

    def check_integrity(self) -> None:
        """Raise RuntimeError if frames wait although no session is active."""
        super().check_integrity()
        if not self.bus.calls.active and self.batcher.waiting:
            raise RuntimeError(
                f"no session is active, but {self.batcher.waiting} streams wait for a pass"
            )


def _check_model(name: str) -> None:
    if name not in ("", Silero.name):
        raise UnknownModel(f"model: {name!r} is not served; use {Silero.name!r}", param="model")


def _detection(request: FindSpeech) -> Detect:
    return Detect(
        threshold=request.threshold,
        prefix_padding_ms=request.prefix_padding_ms,
        silence_duration_ms=request.silence_duration_ms,
    )


def _spans(edges: list[SpeechEdge]) -> list[tuple[float, float]]:
    """Return seconds of speech: starts include their padding, ends exclude the final silence."""
    return [
        (start.ms / 1000, stop.speech_ms / 1000)
        for start, stop in zip(edges[::2], edges[1::2], strict=True)
    ]


def _floats(pcm: bytes) -> list[Floats]:
    """Convert 16-bit PCM to frames, (FRAME,) each, in -1 to 1."""
    return list((np.frombuffer(pcm, "<i2").astype(np.float32) / 32768).reshape(-1, FRAME))
