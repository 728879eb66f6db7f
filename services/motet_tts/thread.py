"""The speech engine on its thread."""

from __future__ import annotations

from functools import partial

from motet_shared import engine_thread
from motet_shared.errors import MotetError

from .engine import Engine
from .utterance import Key, Piece, Utterance


class EngineThread(engine_thread.EngineThread[Engine, Piece]):
    """Its outputs are pieces of sentences."""

    name = "motet-tts"

    def submit(self, key: Key, utterance: Utterance) -> None:
        """`Engine.add`; its refusal arrives as a `Piece` with `error`."""
        self._submit(key, partial(self.engine.add, key, utterance))

    def _refusal(self, key: Key, error: MotetError) -> Piece:
        return Piece(key, error=error)

    def _step(self) -> list[Piece]:
        return self.engine.step()
