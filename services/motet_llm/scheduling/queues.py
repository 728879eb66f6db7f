"""Keep the waiting and the running requests of an engine, and move them between the two."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

from motet_llm.cache.block_tables import BlockTables
from motet_llm.cache.prefix_cache import PrefixCache
from motet_llm.engine.request import Request, Status
from motet_shared.errors import InternalError, Overloaded

from .fairness import FairShares

_rank = attrgetter("rank")


class ReleasePolicy(Protocol):
    """Define what a feature does when a request loses its blocks."""

    def released(self, request: Request) -> None:
        """Drop what belongs to the blocks of a request that was preempted or has ended."""


class RequestQueues:
    """Keep requests in `waiting` and `running`, both sorted by rank.

    shares: tokens served by tenant.
    """

    def __init__(
        self,
        tables: BlockTables,
        prefix_cache: PrefixCache | None,
        policies: Sequence[ReleasePolicy],
        max_waiting: int,
    ):
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.shares = FairShares()
        self.preemptions = 0
        self._tables = tables
        self._prefix_cache = prefix_cache
        self._policies = tuple(policies)
        self._max_waiting = max_waiting

    def add(self, request: Request) -> None:
        """Queue a request. Raises Overloaded when the queue is full."""
        if len(self.waiting) >= self._max_waiting:
            raise Overloaded(
                f"{len(self.waiting)} requests wait already (max_waiting={self._max_waiting}); try later"
            )
        self.shares.enter(request.tenant)
        insort(self.waiting, request, key=_rank)

    def start(self, request: Request) -> None:
        """Move a waiting request to `running`, with empty block tables."""
        self.waiting.remove(request)
        request.status = Status.RUNNING
        insort(self.running, request, key=_rank)
        self._tables.open(request)

    def preempt(self, request: Request) -> None:
        """Move a running request back to `waiting`; it is computed again from its first token."""
        self.running.remove(request)
        self._release(request)
        request.num_computed = 0
        request.status = Status.WAITING
        request.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, request, key=_rank)

    def remove(self, request: Request) -> None:
        """Remove a request from whichever list it is in and free what it holds."""
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        request.status = Status.FINISHED
        self._release(request)
        self.shares.leave(request.tenant)

    def _release(self, request: Request) -> None:
        if self._prefix_cache is not None:
            self._prefix_cache.release(request)
        self._tables.close(request)
        for policy in self._policies:
            policy.released(request)

    def check_integrity(self) -> None:
        """Raise InternalError unless lists, states and block tables agree."""
        for requests, status in ((self.running, Status.RUNNING), (self.waiting, Status.WAITING)):
            if (
                any(r.status is not status for r in requests)
                or sorted(requests, key=_rank) != requests
            ):
                raise InternalError(f"the list of {status.value} requests is out of order")
        if any(r.tables or r.num_computed for r in self.waiting):
            raise InternalError("a waiting request holds blocks")
        self._tables.check_integrity(self.running)
