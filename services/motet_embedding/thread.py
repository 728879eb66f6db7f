"""Run the embedding engine on its thread and return vectors to their callers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import numpy as np

from motet_shared.errors import InternalError, MotetError
from motet_shared.process import engine_thread

from .engine import NO_VECTORS, Engine, StepOutput, Vectors
from .request_queues import Key
from .texts import Text


class EngineThread(engine_thread.EngineThread[Engine, StepOutput]):
    """Step the engine; its outputs are vectors."""

    name = "motet-embedding"

    def submit(self, key: Key, texts: Sequence[Text], priority: int) -> None:
        """Call `Engine.add` on the engine's thread; a refusal arrives as `StepOutput.error`."""
        self._submit(key, partial(self.engine.add, key, texts, priority))

    def _refusal(self, key: Key, error: MotetError) -> StepOutput:
        return StepOutput(key, [], NO_VECTORS, error)

    def _step(self) -> list[StepOutput]:
        return self.engine.step()


class PendingVectors:
    """Collect the vectors of one request; read them in the order of its texts."""

    def __init__(self, count: int):
        self._rows: list[Vectors | None] = [None] * count
        self._error: MotetError | None = None
        self._news = asyncio.Event()

    def put(self, output: StepOutput) -> None:
        """Add vectors of some texts."""
        for place, row in zip(output.places, output.vectors, strict=True):
            self._rows[place] = row
        self._error = self._error or output.error
        self._news.set()

    def fail(self, error: MotetError) -> None:
        """End with an error, which `read` raises."""
        self.put(StepOutput(None, [], NO_VECTORS, error))

    async def read(self, most: int) -> AsyncGenerator[Vectors, None]:
        """Yield (some, V) in order without gaps, at most `most` rows at a time.

        Raises the engine's refusal.
        """
        done = 0
        while done < len(self._rows):
            rows = list(
                itertools.takewhile(lambda row: row is not None, self._rows[done : done + most])
            )
            if rows:
                done += len(rows)
                yield np.stack([row for row in rows if row is not None])
            elif self._error is not None:
                raise self._error
            else:
                self._news.clear()
                await self._news.wait()


class EmbeddingSessions:
    """Submit requests to the engine's thread from one event loop.

    `on_crash` receives the exception that ended the thread.
    """

    def __init__(self, engine: Engine, on_crash: Callable[[BaseException], object]):
        self._on_crash = on_crash
        self._pending: dict[Key, PendingVectors] = {}
        self._keys = itertools.count()
        self.thread = EngineThread.on_loop(engine, self._deliver, self._crashed)

    async def close(self) -> None:
        """End the engine's thread."""
        await asyncio.to_thread(self.thread.stop)

    @asynccontextmanager
    async def submitting(
        self, texts: Sequence[Text], priority: int = 0
    ) -> AsyncIterator[PendingVectors]:
        """Submit texts; provide their answer in the block. Leaving early cancels the request."""
        key = next(self._keys)
        pending = self._pending[key] = PendingVectors(len(texts))
        self.thread.submit(key, texts, priority)
        try:
            yield pending
        finally:
            del self._pending[key]
            self.thread.cancel(key)

    def _deliver(self, outputs: list[StepOutput]) -> None:
        """Pass outputs to their answers; those of cancelled requests are dropped."""
        for output in outputs:
            if (pending := self._pending.get(output.key)) is not None:
                pending.put(output)

    def _crashed(self, error: BaseException) -> None:
        for pending in self._pending.values():
            pending.fail(InternalError(f"the engine ended: {error}"))
        self._on_crash(error)
