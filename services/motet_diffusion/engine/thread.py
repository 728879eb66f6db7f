"""Run the diffusion engine on its thread. Events bypass it: loops emit them as they happen."""

from __future__ import annotations

from functools import partial

from motet_shared.errors import MotetError
from motet_shared.process import engine_thread
from motet_shared.process.engine_thread import Command

from .engine import Engine
from .request import Event, Key, PictureDone, PictureRequest


class EngineThread(engine_thread.EngineThread[Engine, Event]):
    """Run the engine; the only outputs of this thread are refusals."""

    name = "motet-diffusion"

    def submit(self, key: Key, drawing: PictureRequest) -> None:
        """Call `Engine.add` on the thread; a refusal arrives as a `PictureDone` with `error`."""
        self._submit(key, partial(self.engine.add, key, drawing))

    def between_steps(self, command: Command) -> None:
        super().between_steps(command)
        self.engine.batcher.wake()

    def stop(self) -> None:
        super().stop()
        self.engine.close()

    def _refusal(self, key: Key, error: MotetError) -> Event:
        return PictureDone(key, error=error)

    def _step(self) -> list[Event]:
        self.engine.step()
        return []
