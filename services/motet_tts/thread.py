"""The engine on a thread of its own, so that whoever talks to the network never waits for the model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

from motet_shared.errors import MotetError

from .engine import Engine
from .utterance import Key, Piece, Utterance

Command = Callable[[], None]


class EngineThread:
    """Steps an engine while it has work and sleeps while it has none.

    Commands are put into a queue, by any thread and without waiting, and take effect between two steps, in order.
    on_pieces: called on the engine's thread, once per step, with all of its pieces (and the refusals of `submit`s).
    on_crash: called on the engine's thread with the exception that ended it; nothing comes after it.
    """

    def __init__(
        self,
        engine: Engine,
        on_pieces: Callable[[list[Piece]], object],
        on_crash: Callable[[BaseException], object],
    ):
        self.engine = engine
        self._on_pieces = on_pieces
        self._on_crash = on_crash
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._refused: list[Piece] = []
        self._stopping = False
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="motet-tts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the current step and wait for it. Sentences that are not finished end without a word."""
        self._commands.put(self._stop)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def submit(self, key: Key, utterance: Utterance) -> None:
        """`Engine.add`; its refusal arrives as a `Piece` with `error`."""
        self._commands.put(partial(self._add, key, utterance))

    def cancel(self, key: Key) -> None:
        self._commands.put(partial(self.engine.cancel, key))

    @property
    def stuck_for(self) -> float:
        """Seconds that the step which is running has taken so far, 0 between steps; from any thread."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def _add(self, key: Key, utterance: Utterance) -> None:
        try:
            self.engine.add(key, utterance)
        except MotetError as error:
            self._refused.append(Piece(key, error=error))

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while True:
                self._obey()
                if self._stopping:
                    return
                self._step_began = time.monotonic()
                pieces = self._refused + self.engine.step()
                self._refused, self._step_began = [], None
                if pieces:
                    self._on_pieces(pieces)
        except BaseException as error:
            self._on_crash(error)

    def _obey(self) -> None:
        """Follow all commands there are; without work, sleep until one comes."""
        try:
            if not self.engine.has_work:
                self._commands.get()()
            while True:
                self._commands.get_nowait()()
        except Empty:
            pass
