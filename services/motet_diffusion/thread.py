"""The diffusion engine on its thread. Its events do not come through it: painters tell them as they happen."""

from __future__ import annotations

from functools import partial

from motet_shared import engine_thread
from motet_shared.engine_thread import Command
from motet_shared.errors import MotetError

from .drawing import Done, Drawing, Event, Key
from .engine import Engine


class EngineThread(engine_thread.EngineThread[Engine, Event]):
    """Its only outputs are refusals."""

    name = "motet-diffusion"

    def submit(self, key: Key, drawing: Drawing) -> None:
        """`Engine.add`; its refusal arrives as a `Done` with `error`."""
        self._submit(key, partial(self.engine.add, key, drawing))

    def between_steps(self, command: Command) -> None:
        super().between_steps(command)
        self.engine.meeting.wake()

    def stop(self) -> None:
        super().stop()
        self.engine.close()

    def _refusal(self, key: Key, error: MotetError) -> Event:
        return Done(key, error=error)

    def _step(self) -> list[Event]:
        self.engine.step()
        return []
