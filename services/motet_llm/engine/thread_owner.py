"""Assert that objects without locks are used by one thread at a time."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import ParamSpec, TypeVar

from motet_shared.errors import InternalError

T = TypeVar("T")
P = ParamSpec("P")


class ThreadOwner:
    """Record which thread owns an engine and its block pool.

    The first thread that uses them owns them. The one exception is `lend`: while the owner waits,
    the model's thread may use them, to compress a prompt.
    """

    def __init__(self) -> None:
        self._ident: int | None = None

    def check(self) -> None:
        """Raise InternalError unless the calling thread is the owner, or there is none yet."""
        ident = get_ident()
        if self._ident != ident:
            if self._ident is not None:
                raise InternalError(
                    f"thread {ident} uses an engine that belongs to thread {self._ident}; "
                    "call it by EngineThread.between_steps"
                )
            self._ident = ident

    def release(self) -> None:
        """Let the next thread that uses the engine own it."""
        self._ident = None

    def lend(self, function: Callable[P, T]) -> Callable[P, T]:
        """Return `function` for another thread, which owns the engine while it runs.

        The owner must wait for its end.
        """

        def lent(*args: P.args, **options: P.kwargs) -> T:
            owner, self._ident = self._ident, get_ident()
            try:
                return function(*args, **options)
            finally:
                self._ident = owner

        return lent
