"""Submit windows of audio to the engine's thread from coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from motet_shared.process.engine_thread import Pending

from .engine import SAMPLE_RATE, Audio, Engine
from .request import StepOutput, TimedSegment, TranscriptionOptions, WindowResult
from .thread import EngineThread


class Recognizer:
    """Transcribe windows from one event loop.

    `on_crash` is called on that loop with the exception that ended the engine's thread.
    """

    def __init__(self, engine: Engine, on_crash: Callable[[BaseException], object]):
        self.family = engine.family
        self._on_crash = on_crash
        self._pending: Pending[WindowResult] = Pending()
        self.thread = EngineThread.on_loop(engine, self._deliver, self._crashed)

    async def close(self) -> None:
        """End the engine's thread."""
        await asyncio.to_thread(self.thread.stop)

    async def transcribe(
        self, audio: Audio, options: TranscriptionOptions
    ) -> tuple[WindowResult, list[TimedSegment]]:
        """Return the result of one window, and its segments with times from its start.

        Cancellation frees its slot within a step. Raises the engine's errors.
        """
        seconds = len(audio) / SAMPLE_RATE
        features = await asyncio.to_thread(self.thread.engine.prepare, audio)
        result = await self.submit(features, seconds, options)
        return result, await asyncio.to_thread(self.family.segments, result, seconds, options.words)

    async def submit(
        self, features: Any, seconds: float, options: TranscriptionOptions
    ) -> WindowResult:
        """Return the result of prepared features, or of a `StreamChunk`; else as `transcribe`."""
        submit = partial(self.thread.submit, features=features, seconds=seconds, options=options)
        return await self._pending.result(submit, self.thread.cancel)

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            if (result := output.error or output.result) is not None:
                self._pending.settle(output.key, result)

    def _crashed(self, error: BaseException) -> None:
        self._pending.fail(error)
        self._on_crash(error)
