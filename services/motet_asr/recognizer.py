"""Windows of audio to the engine's thread and back, as coroutines."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from motet_shared.errors import InternalError

from .engine import SAMPLE_RATE, Audio, Engine
from .request import Heard, Key, Options, Piece, StepOutput
from .thread import EngineThread


class Recognizer:
    """Use it from one event loop. `on_crash` is called there with what ended the engine's thread."""

    def __init__(self, engine: Engine, on_crash: Callable[[BaseException], object]):
        self.family = engine.family
        self._on_crash = on_crash
        self._heard: dict[Key, asyncio.Future[Heard]] = {}
        self._keys = itertools.count()
        soon = asyncio.get_running_loop().call_soon_threadsafe
        self.thread = EngineThread(
            engine,
            on_outputs=lambda outputs: soon(self._deliver, outputs),
            on_crash=lambda error: soon(self._crashed, error),
        )
        self.thread.start()

    async def close(self) -> None:
        await asyncio.to_thread(self.thread.stop)

    async def hear(self, audio: Audio, options: Options) -> tuple[Heard, list[Piece]]:
        """What is said in one window; times count from its beginning. When cancelled, its slot is free a step later."""
        seconds = len(audio) / SAMPLE_RATE
        features = await asyncio.to_thread(self.thread.engine.prepare, audio)
        key = next(self._keys)
        future = self._heard[key] = asyncio.get_running_loop().create_future()
        self.thread.submit(key, features, seconds, options)
        try:
            heard = await future
        finally:
            del self._heard[key]
            if not future.done() or future.cancelled():
                self.thread.cancel(key)
        return heard, await asyncio.to_thread(self.family.pieces, heard, seconds, options.words)

    def _deliver(self, outputs: list[StepOutput]) -> None:
        """A window that was cancelled meanwhile is no longer listed."""
        for output in outputs:
            future = self._heard.get(output.key)
            if future is None or future.done():
                continue
            if output.error is not None:
                future.set_exception(output.error)
            elif output.heard is not None:
                future.set_result(output.heard)

    def _crashed(self, error: BaseException) -> None:
        for future in self._heard.values():
            if not future.done():
                future.set_exception(InternalError(f"the engine ended: {error}"))
        self._on_crash(error)
