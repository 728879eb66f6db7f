"""Count replies that wait for clients that do not read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 1.0  # seconds without reading after which a client counts as not reading


class SlowReaders:
    """Track the waiting replies of all connections of one server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._since: dict[object, float] = {}

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a reply as waiting for its client to read, while the block runs."""
        token = object()
        self._since[token] = self._clock()
        try:
            yield
        finally:
            del self._since[token]

    @property
    def unwritten(self) -> int:
        """Return how many replies have waited for their client for at least `PATIENCE` seconds."""
        late = self._clock() - PATIENCE
        return sum(since <= late for since in self._since.values())
