"""Submit windows of audio to the engine's thread from coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from motet_shared.process.engine_thread import Pending

from .engine import SAMPLE_RATE, Audio, Engine
from .request import Heard, Options, Piece, StepOutput
from .thread import EngineThread


class Recognizer:
    """Transcribe windows from one event loop.

    `on_crash` is called on that loop with the exception that ended the engine's thread.
    """

    def __init__(self, engine: Engine, on_crash: Callable[[BaseException], object]):
        self.family = engine.family
        self._on_crash = on_crash
        self._pending: Pending[Heard] = Pending()
        self.thread = EngineThread.on_loop(engine, self._deliver, self._crashed)

    async def close(self) -> None:
        await asyncio.to_thread(self.thread.stop)

    async def hear(self, audio: Audio, options: Options) -> tuple[Heard, list[Piece]]:
        """Transcribe one window; times count from its start.

        Cancellation frees its slot within a step.
        """
        seconds = len(audio) / SAMPLE_RATE
        features = await asyncio.to_thread(self.thread.engine.prepare, audio)
        submit = partial(self.thread.submit, features=features, seconds=seconds, options=options)
        heard = await self._pending.result(submit, self.thread.cancel)
        return heard, await asyncio.to_thread(self.family.pieces, heard, seconds, options.words)

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            if (result := output.error or output.heard) is not None:
                self._pending.settle(output.key, result)

    def _crashed(self, error: BaseException) -> None:
        self._pending.fail(error)
        self._on_crash(error)
