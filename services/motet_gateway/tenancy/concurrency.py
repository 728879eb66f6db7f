"""Limit concurrency: count the replies in progress, and refuse new ones above the limit."""

from __future__ import annotations

import asyncio
from typing import Any

from motet_shared.errors import Draining, Overloaded


class Slot:
    """A reserved number of replies; `release` gives them back, once."""

    __slots__ = ("_count", "_limits")

    def __init__(self, limits: ConcurrencyLimits, count: int):
        self._limits, self._count = limits, count

    def release(self) -> None:
        self._limits.active -= self._count
        self._count = 0
        if not self._limits.active:
            self._limits.idle.set()

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class ConcurrencyLimits:
    """Count the replies that are being generated, up to `max_streams`."""

    def __init__(self, max_streams: int):
        self.max_streams = max_streams
        self.active = 0
        self.refused = 0
        self.draining = False
        self.idle = asyncio.Event()  # set while no reply is being generated
        self.idle.set()

    def take(self, count: int = 1, *, is_admitted: bool = False) -> Slot:
        """Reserve room for `count` replies; for those that were admitted before, in any case.

        Raises Overloaded if there is none, Draining if the server is about to stop.
        """
        if self.draining and not is_admitted:
            raise Draining("this server is stopping; try again in a moment")
        if not is_admitted and self.active + count > self.max_streams:
            self.refused += 1
            raise Overloaded(
                f"{self.active} replies are being generated and {count} more would exceed the limit of "
                f"{self.max_streams}; try again in a moment (--max-streams)"
            )
        self.active += count
        self.idle.clear()
        return Slot(self, count)

    def as_rate_limits(self) -> list[dict[str, Any]]:
        """Return the entries of `rate_limits.updated`.

        Room comes back when a reply ends, so there is no time to wait for: `reset_seconds` is 0.
        """
        remaining = max(self.max_streams - self.active, 0)
        return [
            {
                "name": "requests",
                "limit": self.max_streams,
                "remaining": remaining,
                "reset_seconds": 0.0,
            }
        ]
