"""Join a group: connect a rank to the ranks of its stage, and to those of the stages beside it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from motet_kernels import rank_memory
from motet_kernels.rank_memory import RankMemory

from .collectives import Alone, Collectives, GlooCollectives, GroupFailed, SharedCollectives
from .degrees import Degrees

log = logging.getLogger(__name__)

_STEP = 0.005  # seconds between looks at what other ranks have stored


def shared_memory(degrees: Degrees, *, wanted: bool) -> int | None:
    """Return a descriptor of memory for all ranks of a group on this host.

    None: they exchange sums over gloo, because it is not wanted, because no ranks share layers, or
    because this machine cannot.
    """
    if not wanted or degrees.width == 1:
        return None
    if not rank_memory.can_share() or degrees.width > rank_memory.MAX_RANKS:
        log.warning("ranks exchange sums over gloo: native kernels are not available")
        return None
    try:
        return rank_memory.create(degrees.width, degrees.pipeline)
    except OSError as error:
        log.warning("ranks exchange sums over gloo: %s", error)
        return None


def breaking_off(memory: int, degrees: Degrees) -> Callable[[], None]:
    """Return what has all ranks that wait in this memory, or will, give up; from any thread."""
    stages = [RankMemory(memory, 0, degrees.width, 0.0, group=n) for n in range(degrees.pipeline)]

    def break_off() -> None:
        for stage in stages:
            stage.break_off()

    return break_off


class Membership:
    """Hold a rank's place in its group, and its connections.

    stage: what the ranks that compute the same layers do together, by their places. meeting:
    seconds in which all ranks connect, which have started by then. seconds: deadline of everything
    else until `limit`. memory: descriptor of what `shared_memory` has made for all ranks. check:
    raises GroupFailed once a rank is known to have failed; called while this one waits or loads.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        degrees: Degrees,
        meeting: float,
        seconds: float,
        memory: int | None = None,
        check: Callable[[], object] = lambda: None,
    ):
        self.rank, self.degrees, self.check = rank, degrees, check
        self._store = store
        self._store.set_timeout(timedelta(seconds=meeting))
        self._pipeline: GlooCollectives | None = None
        if degrees.pipeline > 1:
            self._pipeline = GlooCollectives(store, rank, degrees.ranks, meeting)
        self.stage = self._connect(meeting, memory)
        self._seconds = seconds
        self.limit(seconds)

    def _connect(self, meeting: float, memory: int | None) -> Collectives:
        """Connect the ranks of a stage: in shared memory if there is some, else over gloo."""
        place, width = self.degrees.place(self.rank), self.degrees.width
        if width == 1:
            return Alone()
        if memory is None:
            return GlooCollectives(self._store, place, width, meeting, f"stage-{self.number}")
        own = RankMemory(memory, place, width, meeting, group=self.number)
        return SharedCollectives(own, meeting)

    @property
    def everyone(self) -> Collectives:
        """Return what all ranks do together."""
        return self.stage if self._pipeline is None else self._pipeline

    @property
    def pipeline(self) -> GlooCollectives:
        """Return what sends hidden states from stage to stage, if there are several."""
        assert self._pipeline is not None
        return self._pipeline

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
        self._seconds = seconds
        self.everyone.limit(seconds)
        self.stage.limit(seconds)

    def exchange(self, name: str, content: str) -> list[bytes]:
        """Return what all ranks give under a name that is used once, by rank.

        The leader returns once all have read it: it may then remove the store.
        """
        ranks = range(self.degrees.ranks)
        keys = [f"{name}-{rank}" for rank in ranks]
        self._store.set(keys[self.rank], content)
        self._wait(keys, name)
        found = [bytes(self._store.get(key)) for key in keys]
        self._store.set(f"{name}-read-{self.rank}", "")
        if self.rank == 0:
            self._wait([f"{name}-read-{rank}" for rank in ranks], name)
        return found

    def _wait(self, keys: list[str], name: str) -> None:
        """Wait until the store has these keys. Raises GroupFailed."""
        given_up = time.monotonic() + self._seconds
        while not self._store.check(keys):
            self.check()
            if time.monotonic() > given_up:
                raise GroupFailed(f"rank {self.rank} waited in vain for {name} of others")
            time.sleep(_STEP)
