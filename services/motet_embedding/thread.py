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

from .engine import NO_VECTORS, Engine, Output, Vectors
from .texts import Text
from .waiting import Key


class EngineThread(engine_thread.EngineThread[Engine, Output]):
    """Step the engine; outputs are vectors."""

    name = "motet-embedding"

    def submit(self, key: Key, texts: Sequence[Text]) -> None:
        """Call `Engine.add` on the engine's thread; a refusal arrives as `Output.error`."""
        self._submit(key, partial(self.engine.add, key, texts))

    def _refusal(self, key: Key, error: MotetError) -> Output:
        return Output(key, [], NO_VECTORS, error)

    def _step(self) -> list[Output]:
        return self.engine.step()


class PendingVectors:
    """Collect the vectors of one request; read them in the order of its texts."""

    def __init__(self, count: int):
        self._rows: list[Vectors | None] = [None] * count
        self._error: MotetError | None = None
        self._news = asyncio.Event()

    def put(self, output: Output) -> None:
        for place, row in zip(output.places, output.vectors, strict=True):
            self._rows[place] = row
        self._error = self._error or output.error
        self._news.set()

    def fail(self, error: MotetError) -> None:
        self.put(Output(None, [], NO_VECTORS, error))

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

    `on_crash` gets the exception that ended the thread.
    """

    def __init__(self, engine: Engine, on_crash: Callable[[BaseException], object]):
        self._on_crash = on_crash
        self._answers: dict[Key, PendingVectors] = {}
        self._keys = itertools.count()
        self.thread = EngineThread.on_loop(engine, self._deliver, self._crashed)

    async def close(self) -> None:
        await asyncio.to_thread(self.thread.stop)

    @asynccontextmanager
    async def submitting(self, texts: Sequence[Text]) -> AsyncIterator[PendingVectors]:
        """Submit texts; provide their answer in the block. Leaving early cancels the request."""
        key = next(self._keys)
        answer = self._answers[key] = PendingVectors(len(texts))
        self.thread.submit(key, texts)
        try:
            yield answer
        finally:
            del self._answers[key]
            self.thread.cancel(key)

    def _deliver(self, outputs: list[Output]) -> None:
        """Pass outputs to their answers; those of cancelled requests are dropped."""
        for output in outputs:
            if (answer := self._answers.get(output.key)) is not None:
                answer.put(output)

    def _crashed(self, error: BaseException) -> None:
        for answer in self._answers.values():
            answer.fail(InternalError(f"the engine ended: {error}"))
        self._on_crash(error)
