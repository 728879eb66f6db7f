"""Run actions later, in the order in which they were added."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any


class Schedule:
    """Run each action at its time, and none before those that were added earlier."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, Callable[..., None], tuple[Any, ...]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        """Run `act` in so many seconds."""
        self._waiting.append((asyncio.get_running_loop().time() + seconds, act, args))
        if self._timer is None:
            self._arm()

    def clear(self) -> None:
        """Drop the actions that have not run."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(self._waiting[0][0], self._run) if self._waiting else None

    def _run(self) -> None:
        _, act, args = self._waiting.popleft()
        act(*args)
        self._arm()
