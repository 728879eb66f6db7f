"""Decide which running requests give way to others, and whether an arrival fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from motet_llm.cache.block_tables import BlockTables
from motet_llm.cache.prefix_cache import PrefixCache
from motet_llm.engine.request import Request

from .budget import SchedulerLimits
from .fairness import tenant_group
from .queues import RequestQueues


class Preemption:
    """Choose requests to preempt; `RequestQueues` moves them."""

    def __init__(
        self,
        queues: RequestQueues,
        tables: BlockTables,
        limits: SchedulerLimits,
        prefix_cache: PrefixCache | None,
    ):
        self._queues = queues
        self._tables = tables
        self._limits = limits
        self._prefix_cache = prefix_cache

    def victim(self) -> Request:
        """Return the running request of the lowest rank, of those out of credit if there are any."""
        running = self._queues.running
        return next((r for r in reversed(running) if r.out_of_credit), running[-1])

    def spill_victim(self, request: Request) -> Request:
        """Return the lowest-ranked request with spilled blocks, or `request` itself."""
        return next(
            r
            for r in reversed(self._queues.running)
            if r is request or r.blocks.spilled is not None
        )

    def victims_for(self, request: Request) -> list[Request] | None:
        """Return the requests to preempt so that `request` fits; None if it cannot fit."""
        needed, shared = self._blocks_needed(request)
        victims: list[Request] = []
        candidates = self._candidates(request)
        while not (self._fits(needed, shared, victims) and self._can_spill(request, victims)):
            victim = next(candidates, None)
            if victim is None:
                return None
            victims.append(victim)
        return victims

    def _blocks_needed(self, request: Request) -> tuple[int, frozenset[int]]:
        """Return an upper bound of the free blocks that the request takes, and those that it shares.

        Where that matters for admission, blocks that it shares with running requests are not
        counted as needed: no victim frees them.
        """
        length = request.max_length if self._limits.contiguous_kv else len(request.tokens)
        needed = self._tables.blocks_for(length)
        if self._prefix_cache is None or needed <= self._tables.num_free - self._promised([]):
            return needed, frozenset()
        if self._tables.is_long(length):
            return needed, frozenset()
        shared = self._prefix_cache.held(request.matchable, request.root)
        return needed - len(shared), shared

    def _fits(self, needed: int, shared: frozenset[int], victims: list[Request]) -> bool:
        """Return True if a request of `needed` blocks could run with `victims` preempted."""
        stay = [r for r in self._queues.running if r not in victims]
        if (
            len(stay) >= self._tables.max_open
            or sum(not r.out_of_credit for r in stay) >= self._limits.max_running
        ):
            return False
        freed = sum(self._tables.num_freed(r, shared) for r in victims)
        return needed <= self._tables.num_free + freed - self._promised(victims)

    def _can_spill(self, request: Request, victims: list[Request]) -> bool:
        """Return True if what the pool cannot hold fits into the tiers without `victims`."""
        due = self._tables.still_to_spill(request)
        if not due:
            return True
        promised = sum(
            self._tables.still_to_spill(r) for r in self._queues.running if r not in victims
        )
        freed = sum(r.blocks.spilled.num_blocks for r in victims if r.blocks.spilled is not None)
        return due + promised <= self._tables.spill_room + freed

    def _promised(self, victims: list[Request]) -> int:
        """Return the blocks that requests which still prefill will allocate."""
        prefilling = (r for r in self._queues.running if r.num_uncomputed > 1 and r not in victims)
        return sum(map(self._tables.outstanding, prefilling))

    def _candidates(self, request: Request) -> Iterator[Request]:
        """Yield the running requests that `request` may preempt.

        First those out of credit, then those that it outranks by priority, then one of a tenant
        with several if its own tenant runs nothing.
        """
        yield from (r for r in reversed(self._queues.running) if r.out_of_credit)
        if self._limits.static_batching:
            return
        busy = [r for r in reversed(self._queues.running) if not r.out_of_credit]
        yield from (r for r in busy if r.priority < request.priority)
        places = Counter(tenant_group(r.tenant) for r in busy)
        if busy and not places[tenant_group(request.tenant)]:
            largest, most = places.most_common(1)[0]
            equals = (
                r
                for r in busy
                if tenant_group(r.tenant) == largest and r.priority == request.priority
            )
            if most > 1 and (youngest := next(equals, None)) is not None:
                yield youngest
