"""The engine on a thread of its own, so that whoever talks to the network never waits for the model."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Unpack

from motet_shared.errors import MotetError
from motet_shared.messages import Sampling

from .engine import Engine, StepOutput
from .request import Key, Options

Command = Callable[[], None]
Step = Callable[[], list[StepOutput]]


class EngineThread:
    """Steps an engine while it has work and sleeps while it has none.

    Commands are put into a queue, by any thread and without waiting, and take effect between two steps, in order.
    on_outputs: called on the engine's thread, once per step, with all of its outputs (and the refusals of `submit`s);
        while the model computes the next step, if the engine overlaps the two.
    on_crash: called on the engine's thread with the exception that ended it; nothing comes after it.
    """

    def __init__(
        self,
        engine: Engine,
        on_outputs: Callable[[list[StepOutput]], object],
        on_crash: Callable[[BaseException], object],
    ):
        self.engine = engine
        self._on_outputs = on_outputs
        self._on_crash = on_crash
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._refused: list[StepOutput] = []
        self._stopping = False
        self._step_began: float | None = None
        self.around_step: Callable[[Step], list[StepOutput]] | None = None  # set it on the engine's thread only
        self._thread = threading.Thread(target=self._run, name="motet-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the current step and wait for it. Requests that are not finished end without a word."""
        self._commands.put(self._stop)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        self.engine.close()

    def submit(self, key: Key, prompt: list[int], sampling: Sampling, **options: Unpack[Options]) -> None:
        """`Engine.add`; its refusal arrives as a `StepOutput` with `error`."""
        self._commands.put(partial(self._add, key, prompt, sampling, options))

    def cancel(self, key: Key) -> None:
        self._commands.put(partial(self.engine.cancel, key))

    def grant(self, key: Key, total: int) -> None:
        self._commands.put(partial(self.engine.grant, key, total))

    def between_steps(self, command: Command) -> None:
        """Have `command` called on the engine's thread before its next step. What it raises ends the thread."""
        self._commands.put(command)

    @property
    def stuck_for(self) -> float:
        """Seconds that the step which is running has taken so far, 0 between steps; from any thread."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def stats(self) -> dict[str, float]:
        """`Engine.stats` and the commands that still wait; from any thread, without waiting for a step."""
        return {**self.engine.stats(), "commands": self._commands.qsize()}

    def _add(self, key: Key, prompt: list[int], sampling: Sampling, options: Options) -> None:
        try:
            self.engine.add(key, prompt, sampling, **options)
        except MotetError as error:
            self._refused.append(StepOutput(key, [], error=error))

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while True:
                self._obey()
                if self._stopping:
                    return
                self._step_began = time.monotonic()
                step, around = partial(self.engine.step, self._emit), self.around_step
                self._emit(step() if around is None else around(step))
                self._step_began = None
        except BaseException as error:
            self._on_crash(error)

    def _emit(self, outputs: list[StepOutput]) -> None:
        refused, self._refused = self._refused, []
        if refused or outputs:
            self._on_outputs(refused + outputs)

    def _obey(self) -> None:
        """Follow all commands there are; without work, sleep until one comes or a deadline passes."""
        try:
            if not self.engine.has_work:
                self._commands.get(timeout=self._patience())()
            while True:
                self._commands.get_nowait()()
        except Empty:
            pass

    def _patience(self) -> float | None:
        """Seconds until something happens by itself; None: never."""
        deadline = self.engine.next_deadline
        return None if deadline == math.inf else max(0.0, deadline - time.monotonic())
