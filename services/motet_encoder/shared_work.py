"""Share work that several callers request: done once, cancelled when the last of them has left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


@dataclass(slots=True)
class _SharedTask(Generic[Result]):
    """Hold a running task, and the number of callers that wait for it."""

    task: asyncio.Task[Result]
    waiting: int = 0


class SharedWork(Generic[Result]):
    """Run one task per name; later callers of the name join it."""

    def __init__(self) -> None:
        self._works: dict[str, _SharedTask[Result]] = {}

    def __len__(self) -> int:
        return len(self._works)

    async def result(self, name: str, begin: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Return or raise the result of `begin`'s coroutine, started by the first caller."""
        work = self._works.get(name)
        if work is None:
            work = self._works[name] = _SharedTask(asyncio.create_task(begin()))
            work.task.add_done_callback(lambda _: self._forget(name, work))
        work.waiting += 1
        try:
            return await asyncio.shield(work.task)
        finally:
            work.waiting -= 1
            if not work.waiting and not work.task.done():
                self._forget(name, work)
                work.task.cancel()

    def _forget(self, name: str, work: _SharedTask[Result]) -> None:
        if self._works.get(name) is work:
            del self._works[name]
