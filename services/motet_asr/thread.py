"""The engine on a thread of its own, so that whoever talks to the network never waits for the model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

from torch import Tensor

from motet_shared.errors import MotetError

from .engine import Engine
from .request import Key, Options, StepOutput

Command = Callable[[], None]


class EngineThread:
    """Steps an engine while it has work and sleeps while it has none.

    Commands may come from any thread and never wait; they take effect between two steps, in order.
    on_outputs: called on the engine's thread after a step in which windows ended, with all of them.
    on_crash: called on the engine's thread with the exception that ended it; nothing comes after it.
    """

    def __init__(
        self,
        engine: Engine,
        on_outputs: Callable[[list[StepOutput]], object],
        on_crash: Callable[[BaseException], object],
    ):
        self.engine = engine
        self._on_outputs, self._on_crash = on_outputs, on_crash
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._refused: list[StepOutput] = []
        self._stopping = False
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="motet-asr", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the current step and wait for it. Windows that are not finished end without a word."""
        self._commands.put(self._stop)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def submit(self, key: Key, features: Tensor, seconds: float, options: Options) -> None:
        """`Engine.add`; its refusal arrives as a `StepOutput` with `error`."""
        self._commands.put(partial(self._add, key, features, seconds, options))

    def cancel(self, key: Key) -> None:
        self._commands.put(partial(self.engine.cancel, key))

    @property
    def stuck_for(self) -> float:
        """Seconds that the step which is running has taken so far, 0 between steps; from any thread."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def stats(self) -> dict[str, float]:
        return {**self.engine.stats(), "commands": self._commands.qsize()}

    def _add(self, key: Key, features: Tensor, seconds: float, options: Options) -> None:
        try:
            self.engine.add(key, features, seconds, options)
        except MotetError as error:
            self._refused.append(StepOutput(key, error=error))

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while True:
                self._obey()
                if self._stopping:
                    return
                self._step_began = time.monotonic()
                outputs = self.engine.step() if self.engine.has_work else []
                self._step_began = None
                refused, self._refused = self._refused, []
                if refused or outputs:
                    self._on_outputs(refused + outputs)
        except BaseException as error:
            self._on_crash(error)

    def _obey(self) -> None:
        """Follow all commands there are; without work, sleep until one comes."""
        try:
            if not self.engine.has_work and not self._refused:
                self._commands.get()()
            while True:
                self._commands.get_nowait()()
        except Empty:
            pass
