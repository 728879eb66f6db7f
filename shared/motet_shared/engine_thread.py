"""An engine on a thread of its own, so that whoever talks to the network never waits for the model.

What the engine computes, and what it is asked, is its service's: this is the queue of commands, the loop of steps, an
honest end, and a place for those who wait.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Hashable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, Self, TypeVar

from .errors import InternalError, MotetError

Command = Callable[[], object]


class Steppable(Protocol):
    """An engine: requests go in between two steps, and each step serves all that are there."""

    @property
    def has_work(self) -> bool: ...

    def cancel(self, key: Any) -> None: ...

    def stats(self) -> dict[str, float]: ...


Engine = TypeVar("Engine", bound=Steppable)
Output = TypeVar("Output")
Result = TypeVar("Result")


class Pending(Generic[Result]):
    """What callers on an event loop wait for while an engine works on it: one result each. Use it from that loop."""

    def __init__(self) -> None:
        self._futures: dict[Hashable, asyncio.Future[Result]] = {}
        self._keys = itertools.count()

    async def result(self, submit: Callable[[int], object], cancel: Callable[[int], object]) -> Result:
        """What `settle` is given for the key that `submit` gets. If the caller leaves before, `cancel` gets it too."""
        key = next(self._keys)
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._futures[key] = future
        try:
            submit(key)
            return await future
        finally:
            del self._futures[key]
            if not future.done() or future.cancelled():
                cancel(key)

    def settle(self, key: Hashable, result: Result | MotetError) -> None:
        """An error is raised there. What was cancelled meanwhile is no longer listed."""
        future = self._futures.get(key)
        if future is None or future.done():
            return
        if isinstance(result, MotetError):
            future.set_exception(result)
        else:
            future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """The engine has ended: so does all that waits for it."""
        for key in self._futures:
            self.settle(key, InternalError(f"the engine ended: {error}"))


class EngineThread(ABC, Generic[Engine, Output]):
    """Steps an engine while it has work and sleeps while it has none.

    Commands are put into a queue, by any thread and without waiting, and take effect between two steps, in order.
    on_outputs: called on the engine's thread, once per step that has any, with all of its outputs (and the refusals of
        what was submitted before it).
    on_crash: called on the engine's thread with the exception that ended it; nothing comes after it. `watch` calls it
        too, on the loop.
    """

    name = "motet-engine"  # of the thread

    def __init__(
        self,
        engine: Engine,
        on_outputs: Callable[[list[Output]], object],
        on_crash: Callable[[BaseException], object],
    ):
        self.engine = engine
        self._on_outputs = on_outputs
        self._on_crash = on_crash
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._refused: list[Output] = []
        self._stopping = False
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    @classmethod
    def on_loop(
        cls, engine: Engine, on_outputs: Callable[[list[Output]], object], on_crash: Callable[[BaseException], object]
    ) -> Self:
        """One that has started, and calls both on the event loop of the caller."""
        soon = asyncio.get_running_loop().call_soon_threadsafe
        thread = cls(engine, lambda outputs: soon(on_outputs, outputs), lambda error: soon(on_crash, error))
        thread.start()
        return thread

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the current step and wait for it. What is not finished ends without a word."""
        self.between_steps(self._stop)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def cancel(self, key: Any) -> None:
        self.between_steps(partial(self.engine.cancel, key))

    def between_steps(self, command: Command) -> None:
        """Have `command` called on the engine's thread before its next step. What it raises ends the thread."""
        self._commands.put(command)

    @property
    def stuck_for(self) -> float:
        """Seconds that the step which is running has taken so far, 0 between steps; from any thread."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def watch(self, longest: float) -> Callable[[float], Coroutine[Any, Any, None]]:
        """A duty for `Bus.monitor`: it crashes when a step has taken `longest` seconds.

        The process says that it lives while its engine computes, so one that hangs must be noticed beside it.
        """

        async def look(elapsed: float) -> None:
            if (seconds := self.stuck_for) > longest:
                self._on_crash(InternalError(f"a step has taken {seconds:.0f} s (step_timeout)"))

        return look

    def stats(self) -> dict[str, float]:
        """The engine's, and the commands that still wait; from any thread, without waiting for a step."""
        return {**self.engine.stats(), "commands": self._commands.qsize()}

    # ---------------------------------------------------------------------------------------------- for its subclasses
    def _submit(self, key: Any, add: Command) -> None:
        """Have `add` put a request into the engine. A MotetError of it is an output; anything else ends the thread."""
        self.between_steps(partial(self._add, key, add))

    @abstractmethod
    def _refusal(self, key: Any, error: MotetError) -> Output:
        """The output for a request that the engine did not take."""

    @abstractmethod
    def _step(self) -> list[Output]:
        """One step of the engine, which may have nothing to do."""

    def _patience(self) -> float | None:
        """Seconds until an engine without work has some by itself; None: never."""
        return None

    def _emit(self, outputs: list[Output]) -> None:
        refused, self._refused = self._refused, []
        if refused or outputs:
            self._on_outputs(refused + outputs)

    # -------------------------------------------------------------------------------------------------- on the thread
    def _run(self) -> None:
        try:
            while True:
                self._obey()
                if self._stopping:
                    return
                self._step_began = time.monotonic()
                self._emit(self._step())
                self._step_began = None
        except BaseException as error:
            self._on_crash(error)

    def _obey(self) -> None:
        """Follow all commands there are; without work, sleep until one comes or the patience ends."""
        try:
            if not self.engine.has_work:
                patience = self._patience()
                self._commands.get(timeout=None if patience is None else min(patience, threading.TIMEOUT_MAX))()
            while True:
                self._commands.get_nowait()()
        except Empty:
            pass

    def _add(self, key: Any, add: Command) -> None:
        try:
            add()
        except MotetError as error:
            self._refused.append(self._refusal(key, error))

    def _stop(self) -> None:
        self._stopping = True
