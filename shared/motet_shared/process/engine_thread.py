"""Run an engine on its own thread, so that network code never waits for the model.

This module provides the command queue, the step loop, crash reporting, and futures for waiting
callers; the engine itself and its requests belong to the service.
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

from motet_shared.errors import InternalError, MotetError

Command = Callable[[], object]


class Steppable(Protocol):
    """Define an engine: requests are added between two steps, and each step serves all of them."""

    @property
    def has_work(self) -> bool: ...

    def cancel(self, key: Any) -> None: ...

    def stats(self) -> dict[str, float]: ...


Engine = TypeVar("Engine", bound=Steppable)
Output = TypeVar("Output")
Result = TypeVar("Result")


class Pending(Generic[Result]):
    """Hold the futures of event-loop callers that wait for an engine: one result each.

    Use it from that loop only.
    """

    def __init__(self) -> None:
        self._futures: dict[Hashable, asyncio.Future[Result]] = {}
        self._keys = itertools.count()

    async def result(
        self, submit: Callable[[int], object], cancel: Callable[[int], object]
    ) -> Result:
        """Submit a request under a new key and return what `settle` is given for that key.

        If the caller is cancelled before the result, `cancel` is called with the key.
        """
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
        """Set the result of a key, or raise an error there; ignore unknown (cancelled) keys."""
        future = self._futures.get(key)
        if future is None or future.done():
            return
        if isinstance(result, MotetError):
            future.set_exception(result)
        else:
            future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Fail all waiting callers with InternalError because the engine has ended."""
        for key in self._futures:
            self.settle(key, InternalError(f"the engine ended: {error}"))


class EngineThread(ABC, Generic[Engine, Output]):
    """Step an engine while it has work, and sleep while it has none.

    Commands are queued by any thread without waiting, and run between two steps, in order.

    on_outputs: called on the engine's thread, once per step with outputs, with all of them
        (including the refusals of requests that were submitted before the step).
    on_crash: called on the engine's thread with the exception that ended it; nothing follows.
        `watch` calls it too, on the loop.
    """

    name = "motet-engine"  # thread name

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
        self._lock = threading.Lock()  # of the number of commands given, by any thread
        self._given = self._run_count = 0
        self._refused: list[Output] = []
        self._stopping = False
        self._step_began: float | None = None
        self._stepped = 0.0  # seconds of all steps that have ended
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    @classmethod
    def on_loop(
        cls,
        engine: Engine,
        on_outputs: Callable[[list[Output]], object],
        on_crash: Callable[[BaseException], object],
    ) -> Self:
        """Start a thread whose callbacks run on the caller's event loop."""
        soon = asyncio.get_running_loop().call_soon_threadsafe
        thread = cls(
            engine, lambda outputs: soon(on_outputs, outputs), lambda error: soon(on_crash, error)
        )
        thread.start()
        return thread

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current step and wait for the thread; unfinished requests are dropped."""
        self.between_steps(self._stop)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def cancel(self, key: Any) -> None:
        """Cancel a request before the next step."""
        self.between_steps(partial(self.engine.cancel, key))

    def between_steps(self, command: Command) -> None:
        """Call `command` on the engine's thread before its next step.

        An exception that it raises ends the thread.
        """
        with self._lock:
            self._given += 1
        self._commands.put(command)

    @property
    def step_seconds(self) -> float:
        """Return the seconds that the current step has taken, 0 between steps; from any thread."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def busy_seconds(self) -> float:
        """Return the seconds that steps have taken since the start; from any thread."""
        return self._stepped + self.step_seconds

    def watch(self, longest: float) -> Callable[[float], Coroutine[Any, Any, None]]:
        """Return a duty for `Bus.monitor` that crashes when a step takes more than `longest` s.

        The process keeps sending heartbeats while its engine computes, so a hanging engine must be
        detected separately.
        """

        async def check(elapsed: float) -> None:
            if (seconds := self.step_seconds) > longest:
                self._on_crash(InternalError(f"a step has taken {seconds:.0f} s (step_timeout)"))

        return check

    def stats(self) -> dict[str, float]:
        """Return the engine's statistics and the number of commands that have not run, without waiting for a step.

        It may be called from any thread. Commands that are counted as run have had their effect on the statistics.
        """
        commands = self._given - self._run_count
        return {**self.engine.stats(), "commands": commands}

    # --------------------------------------------------------------------------- for its subclasses
    def _submit(self, key: Any, add: Command) -> None:
        """Queue `add`, which puts a request into the engine.

        A MotetError that it raises becomes an output; any other exception ends the thread.
        """
        self.between_steps(partial(self._add, key, add))

    @abstractmethod
    def _refusal(self, key: Any, error: MotetError) -> Output:
        """Return the output for a request that the engine refused."""

    @abstractmethod
    def _step(self) -> list[Output]:
        """Run one step of the engine, which may have nothing to do; return its outputs."""

    def _patience(self) -> float | None:
        """Return the seconds until an idle engine has work of its own; None for never."""
        return None

    def _emit(self, outputs: list[Output]) -> None:
        refused, self._refused = self._refused, []
        if refused or outputs:
            self._on_outputs(refused + outputs)

    # -------------------------------------------------------------------------------- on the thread
    def _run(self) -> None:
        try:
            while True:
                self._run_commands()
                if self._stopping:
                    return
                self._step_began = time.monotonic()
                self._emit(self._step())
                self._stepped += self.step_seconds
                self._step_began = None
        except BaseException as error:
            self._on_crash(error)

    def _run_commands(self) -> None:
        """Run all queued commands; without work, sleep until one arrives or the patience ends."""
        try:
            if not self.engine.has_work:
                patience = self._patience()
                self._run_one(
                    self._commands.get(
                        timeout=None if patience is None else min(patience, threading.TIMEOUT_MAX)
                    )
                )
            while True:
                self._run_one(self._commands.get_nowait())
        except Empty:
            pass

    def _run_one(self, command: Command) -> None:
        command()
        self._run_count += 1

    def _add(self, key: Any, add: Command) -> None:
        try:
            add()
        except MotetError as error:
            self._refused.append(self._refusal(key, error))

    def _stop(self) -> None:
        self._stopping = True
