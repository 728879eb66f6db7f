"""Who runs in the next step: continuous batching with chunked prefill under one token budget.

The oldest request always makes progress: decode tokens go first, oldest first, then prefill chunks, then arrivals in
order. When blocks run out, paused requests give theirs up first, then the youngest; a preempted request waits at its
old place and is computed again, so nothing of it is lost. A request is admitted with the blocks of all its tokens,
so only decoding can run short.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from operator import attrgetter

from motet_shared.errors import InternalError, Overloaded

from .block_pool import BlockPool
from .request import Request, Status

_arrival = attrgetter("arrival")


@dataclass(slots=True, frozen=True)
class Work:
    """Compute the next `num_tokens` tokens of `request`; if those are all, draw one."""

    request: Request
    num_tokens: int

    @property
    def draws(self) -> bool:
        return self.num_tokens == self.request.num_uncomputed


class Scheduler:
    """`waiting` and `running` are sorted by arrival; paused requests stay in either and are passed over."""

    def __init__(self, pool: BlockPool, *, token_budget: int, max_running: int, max_waiting: int):
        self.pool = pool
        self.token_budget = token_budget
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request. Raises Overloaded when the queue is full."""
        if len(self.waiting) >= self.max_waiting:
            raise Overloaded(f"{len(self.waiting)} requests wait already (max_waiting={self.max_waiting}); try later")
        insort(self.waiting, request, key=_arrival)

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is, and free what it holds."""
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        request.status = Status.FINISHED
        self._release(request)

    @property
    def has_work(self) -> bool:
        """Whether `schedule` would find something to run now."""
        return any(not r.paused for r in self.running) or any(not r.paused for r in self.waiting)

    @property
    def num_paused(self) -> int:
        return sum(r.paused for r in [*self.running, *self.waiting])

    def schedule(self) -> list[Work]:
        """The work of one step within budget and blocks, one `Work` per request, those of a single token first."""
        active = [r for r in self.running if not r.paused][: self.max_running]
        decodes = self._decodes(active)
        budget = self.token_budget - len(decodes)
        prefills: list[Work] = []
        for request in active:
            if request.status is Status.RUNNING and request.num_uncomputed > 1 and budget:
                prefills.append(Work(request, min(budget, request.num_uncomputed)))
                budget -= prefills[-1].num_tokens
        room = self.max_running - sum(r.status is Status.RUNNING for r in active)
        while budget and room and (arrived := self._admit()):
            prefills.append(Work(arrived, min(budget, arrived.num_uncomputed)))
            budget -= prefills[-1].num_tokens
            room -= 1
        return sorted(decodes + prefills, key=lambda work: work.num_tokens > 1)

    def _decodes(self, active: list[Request]) -> list[Work]:
        decodes = []
        for request in active:
            if request.status is Status.RUNNING and request.num_uncomputed == 1 and self._may_append(request):
                decodes.append(Work(request, 1))
        return decodes

    def _may_append(self, request: Request) -> bool:
        """Find a block for one more token, by preemption if need be. False if the request itself had to give way."""
        if self.pool.blocks_for(len(request.tokens)) <= len(request.block_table):
            return True
        while not self.pool.num_free:
            victim = self._victim()
            self._preempt(victim)
            if victim is request:
                return False
        request.block_table += self.pool.allocate(1)
        return True

    def _victim(self) -> Request:
        """The youngest paused request, else the youngest. It has no work in this step yet: decodes go oldest first."""
        return next((r for r in reversed(self.running) if r.paused), self.running[-1])

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_computed = 0
        request.status = Status.WAITING
        request.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, request, key=_arrival)

    def _admit(self) -> Request | None:
        """Move the first waiting request that may go on to `running`. A later one never overtakes it."""
        request = next((r for r in self.waiting if not r.paused), None)
        if request is None:
            return None
        needed = self.pool.blocks_for(len(request.tokens))
        paused = [r for r in self.running if r.paused]
        if needed > self.pool.num_free + sum(len(r.block_table) for r in paused):
            return None
        while needed > self.pool.num_free:
            self._preempt(paused.pop())
        request.block_table = self.pool.allocate(needed)
        request.status = Status.RUNNING
        self.waiting.remove(request)
        insort(self.running, request, key=_arrival)
        return request

    def _release(self, request: Request) -> None:
        self.pool.free(request.block_table)
        request.block_table = []

    def check_integrity(self) -> None:
        """Raise InternalError unless lists, states, block tables and pool agree."""
        for requests, status in ((self.running, Status.RUNNING), (self.waiting, Status.WAITING)):
            if any(r.status is not status for r in requests) or sorted(requests, key=_arrival) != requests:
                raise InternalError(f"the list of {status.value} requests is out of order")
        for request in self.running:
            if request.num_computed > len(request.block_table) * self.pool.block_size:
                raise InternalError(f"request {request.key!r}: more tokens computed than its blocks hold")
        if any(r.block_table or r.num_computed for r in self.waiting):
            raise InternalError("a waiting request holds blocks")
        self.pool.check_integrity(r.block_table for r in self.running)
