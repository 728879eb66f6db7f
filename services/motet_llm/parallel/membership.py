"""Join a group: connect a rank to the ranks of its stage, and to those of the stages beside it."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from .collectives import Collectives, GroupFailed
from .degrees import Degrees


class Membership:
    """Hold a rank's place in its group, and its connections.

    everyone: connects all ranks. stage: those that compute the same layers, by their places.
    meeting: seconds in which all ranks connect, which have started by then. seconds: deadline of
    everything else until `limit`.
    """

    def __init__(
        self, store: dist.Store, rank: int, degrees: Degrees, meeting: float, seconds: float
    ):
        self.rank, self.degrees = rank, degrees
        self._store = store
        self._store.set_timeout(timedelta(seconds=meeting))
        self.everyone = self.stage = Collectives(store, rank, degrees.ranks, meeting)
        if degrees.pipeline > 1:
            name = f"stage-{self.number}"
            self.stage = Collectives(store, degrees.place(rank), degrees.width, meeting, name)
        self._store.set_timeout(timedelta(seconds=seconds))
        self.limit(seconds)

    @property
    def number(self) -> int:
        """Return the number of the rank's stage."""
        return self.degrees.stage(self.rank)

    @property
    def is_last(self) -> bool:
        """Return True for a rank of the last stage."""
        return self.number == self.degrees.pipeline - 1

    @property
    def before(self) -> int:
        """Return the rank at the same place of the stage before; of the last for the first."""
        return (self.rank - self.degrees.width) % self.degrees.ranks

    @property
    def after(self) -> int:
        """Return the rank at the same place of the stage after; of the first for the last."""
        return (self.rank + self.degrees.width) % self.degrees.ranks

    def limit(self, seconds: float) -> None:
        """Set the deadline of the collectives that follow."""
        self.everyone.limit(seconds)
        self.stage.limit(seconds)

    def exchange(self, name: str, content: str) -> list[bytes]:
        """Return what all ranks give under a name that is used once, by rank."""
        try:
            self._store.set(f"{name}-{self.rank}", content)
            return [bytes(self._store.get(f"{name}-{rank}")) for rank in range(self.degrees.ranks)]
        except RuntimeError as error:  # of the store: a rank is late
            raise GroupFailed(f"rank {self.rank} waited in vain for {name} of others") from error
