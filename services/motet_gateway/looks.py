"""What the gateway remembers of the stack's heartbeats: each of the last seconds, and few of the minute before."""

from __future__ import annotations

from collections import deque

from motet_shared.discovery import HEARTBEAT_EVERY, Directory
from motet_shared.doctor import Look

LONGEST = 60.0  # seconds that are remembered
_CLOSE = 10.0  # seconds of which every look is
_SPARSE = 10  # of those before, one of so many is


class Looks:
    """A duty of the bus (`tick`) looks at the directory as often as heartbeats come. Time is that of its ticks.

    A look keeps heartbeats that have arrived, no copies: thirty of them are all there is of a process, about 60 kB.
    """

    def __init__(self, directory: Directory):
        self._directory = directory
        self._kept: deque[tuple[int, Look]] = deque()
        self._count = 0
        self._now = 0.0

    async def tick(self, elapsed: float) -> None:
        self._now += elapsed
        if self._now >= self._count * HEARTBEAT_EVERY:
            self._count += 1
            self._kept.append((self._count, Look(self._now, self._directory.everyone())))
            self._thin()

    def _thin(self) -> None:
        close, oldest = self._now - _CLOSE, self._now - LONGEST - HEARTBEAT_EVERY
        kept = [
            (number, look)
            for number, look in self._kept
            if look.time >= close or (number % _SPARSE == 0 and look.time >= oldest)
        ]
        self._kept = deque(kept)

    def last(self, seconds: float) -> list[Look]:
        """The looks of the last so many seconds, the oldest first; two at the least, if there are."""
        looks = [look for _, look in self._kept]
        inside = sum(look.time >= self._now - seconds for look in looks)
        return looks[-max(inside, 2) :]

    def seconds(self, seconds: float) -> float:
        """How much of that there is to look back on."""
        looks = self.last(seconds)
        return looks[-1].time - looks[0].time if looks else 0.0
