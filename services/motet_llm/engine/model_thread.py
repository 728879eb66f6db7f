"""Run the model's computations on one thread of their own, or on the caller's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, ParamSpec, Protocol, TypeVar

from .thread_owner import ThreadOwner

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")


class Computation(Protocol[T_co]):
    """Represent a computation that was started."""

    def result(self) -> T_co:
        """Return the result, once it is there. Raises what the computation raised."""


class _Deferred(Generic[T]):
    """Compute when the result is asked for."""

    def __init__(self, function: Callable[[], T]):
        self._function = function

    def result(self) -> T:
        return self._function()


class ModelThread:
    """Run functions one after the other on the model's thread, or on the caller's without overlap.

    OpenMP keeps a thread pool for each thread that computes. Once those pools have more threads
    than there are cores, none of them spins from one kernel to the next: that costs a third of a
    small step's time.
    """

    def __init__(self, *, overlap: bool, owner: ThreadOwner):
        self._executor = ThreadPoolExecutor(1, "motet-model") if overlap else None
        self._owner = owner

    @property
    def overlaps(self) -> bool:
        """Return True if computations run beside the caller's thread."""
        return self._executor is not None

    def start(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> Computation[T]:
        """Begin to compute. Without overlap, that happens when the result is asked for."""
        if self._executor is None:
            return _Deferred(partial(function, *args, **options))
        return self._executor.submit(function, *args, **options)

    def call(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call `function` between steps, and return its result."""
        return self.start(function, *args, **options).result()

    def call_as_owner(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call `function` as `call` does, and let it use the engine's blocks meanwhile.

        The one exception to the rule that a single thread uses them: compressing a prompt both
        computes and moves blocks. The caller, who owns the engine, waits.
        """
        if self._executor is None:
            return function(*args, **options)
        return self.call(self._owner.lend(function), *args, **options)

    def close(self) -> None:
        """End the thread."""
        if self._executor is not None:
            self._executor.shutdown()
