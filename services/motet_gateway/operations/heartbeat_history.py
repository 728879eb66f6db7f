"""Keep the heartbeats of the stack: all of the last seconds, and a few of the minute before."""

from __future__ import annotations

from collections import deque

from motet_doctor import Snapshot
from motet_shared.wire.discovery import HEARTBEAT_EVERY, Directory

LONGEST = 60.0  # seconds that are kept
_CLOSE = 10.0  # seconds of which every snapshot is kept
_SPARSE = 10  # one in so many is kept of those before


class HeartbeatHistory:
    """Keep snapshots of the directory, one per heartbeat interval, taken by the bus (`tick`).

    Time is that of its ticks. A snapshot refers to received heartbeats and copies none; of an
    instance thirty are kept, about 60 kB.
    """

    def __init__(self, directory: Directory):
        self._directory = directory
        self._kept: deque[tuple[int, Snapshot]] = deque()
        self._count = 0
        self._now = 0.0

    async def tick(self, elapsed: float) -> None:
        self._now += elapsed
        if self._now >= self._count * HEARTBEAT_EVERY:
            self._count += 1
            self._kept.append((self._count, Snapshot(self._now, self._directory.everyone())))
            self._thin()

    def _thin(self) -> None:
        close, oldest = self._now - _CLOSE, self._now - LONGEST - HEARTBEAT_EVERY
        kept = [
            (number, snapshot)
            for number, snapshot in self._kept
            if snapshot.time >= close or (number % _SPARSE == 0 and snapshot.time >= oldest)
        ]
        self._kept = deque(kept)

    def last(self, seconds: float) -> list[Snapshot]:
        """Return the snapshots of the last `seconds`, oldest first; at least two if there are."""
        snapshots = [snapshot for _, snapshot in self._kept]
        inside = sum(snapshot.time >= self._now - seconds for snapshot in snapshots)
        return snapshots[-max(inside, 2) :]

    def seconds(self, seconds: float) -> float:
        """Return how many of the last `seconds` the snapshots cover."""
        snapshots = self.last(seconds)
        return snapshots[-1].time - snapshots[0].time if snapshots else 0.0
