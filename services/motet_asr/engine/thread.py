"""Run the speech recognition engine on its own thread."""

from __future__ import annotations

from functools import partial
from typing import Any

from motet_shared.errors import MotetError
from motet_shared.process import engine_thread

from .engine import Engine
from .request import Key, StepOutput, TranscriptionOptions


class EngineThread(engine_thread.EngineThread[Engine, StepOutput]):
    """Step the engine; outputs are windows that have ended."""

    name = "motet-asr"

    def submit(
        self, key: Key, features: Any, seconds: float, options: TranscriptionOptions
    ) -> None:
        """Call `Engine.add` on the engine's thread; a refusal arrives as `StepOutput.error`."""
        self._submit(key, partial(self.engine.add, key, features, seconds, options))

    def _refusal(self, key: Key, error: MotetError) -> StepOutput:
        return StepOutput(key, error=error)

    def _step(self) -> list[StepOutput]:
        return self.engine.step() if self.engine.has_work else []
