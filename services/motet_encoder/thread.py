"""Run the encoder engine on its thread, and submit pictures to it as coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from torch import Tensor

from motet_shared.errors import MotetError
from motet_shared.process import engine_thread

from .engine import Engine, Key, StepOutput
from .families import Prepared


class EngineThread(engine_thread.EngineThread[Engine, StepOutput]):
    """Run the encoder engine; its outputs are encoded pictures."""

    name = "motet-encoder"

    def submit(self, key: Key, picture: Prepared) -> None:
        """Call `Engine.add` on the engine's thread; a refusal arrives as an error output."""
        self._submit(key, partial(self.engine.add, key, picture))

    def _refusal(self, key: Key, error: MotetError) -> StepOutput:
        return StepOutput(key, error)

    def _step(self) -> list[StepOutput]:
        return self.engine.step()


class MediaEncoder:
    """Encode pictures from one event loop.

    `on_crash` is called there with the error of the engine's thread.
    """

    def __init__(self, engine: Engine, on_crash: Callable[[BaseException], object]):
        self._on_crash = on_crash
        self._pending: engine_thread.Pending[Tensor] = engine_thread.Pending()
        self.thread = EngineThread.on_loop(engine, self._deliver, self._crashed)

    async def close(self) -> None:
        """End the engine's thread."""
        await asyncio.to_thread(self.thread.stop)

    async def encode(self, picture: Prepared) -> Tensor:
        """Return the embeddings `[L, T, X]`.

        A cancelled picture leaves the queue after the current step.
        """
        return await self._pending.result(
            lambda key: self.thread.submit(key, picture), self.thread.cancel
        )

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            self._pending.settle(output.key, output.result)

    def _crashed(self, error: BaseException) -> None:
        self._pending.fail(error)
        self._on_crash(error)
