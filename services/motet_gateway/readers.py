"""Clients that do not read: how many replies wait for one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 1.0  # seconds: a client that takes nothing for as long does not read


class Readers:
    """Of one server, over all of its connections."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._since: dict[object, float] = {}

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """In the block a reply waits until its client has taken some of what was sent."""
        token = object()
        self._since[token] = self._clock()
        try:
            yield
        finally:
            del self._since[token]

    @property
    def unwritten(self) -> int:
        """Replies that wait for clients who do not read."""
        late = self._clock() - PATIENCE
        return sum(since <= late for since in self._since.values())
