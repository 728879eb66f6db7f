"""Run the speech engine on its own thread."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from motet_shared.errors import MotetError
from motet_shared.process import engine_thread

from .engine import Engine
from .utterance import Key, StepOutput, Utterance


class EngineThread(engine_thread.EngineThread[Engine, StepOutput]):
    """Step the engine; its outputs are samples of sentences."""

    name = "motet-tts"

    def submit(self, key: Key, utterance: Utterance) -> None:
        """Call `Engine.add` on the engine's thread; a refusal arrives as `StepOutput.error`."""
        self._submit(key, partial(self.engine.add, key, utterance))

    def feed(self, key: Key, ids: Sequence[int], *, last: bool) -> None:
        """Call `Engine.feed` on the engine's thread."""
        self.between_steps(partial(self.engine.feed, key, ids, last=last))

    def _refusal(self, key: Key, error: MotetError) -> StepOutput:
        return StepOutput(key, error=error)

    def _step(self) -> list[StepOutput]:
        return self.engine.step()
