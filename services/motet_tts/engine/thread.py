"""Run the speech engine on its own thread."""

from __future__ import annotations

from functools import partial

from motet_shared.errors import MotetError
from motet_shared.process import engine_thread

from .engine import Engine
from .utterance import Key, Piece, Utterance


class EngineThread(engine_thread.EngineThread[Engine, Piece]):
    """Step the engine; outputs are pieces of sentences."""

    name = "motet-tts"

    def submit(self, key: Key, utterance: Utterance) -> None:
        """Call `Engine.add` on the engine's thread; a refusal arrives as `Piece.error`."""
        self._submit(key, partial(self.engine.add, key, utterance))

    def _refusal(self, key: Key, error: MotetError) -> Piece:
        return Piece(key, error=error)

    def _step(self) -> list[Piece]:
        return self.engine.step()
