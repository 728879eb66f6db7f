"""Share slots for costly work fairly between tenants: no tenant holds all, each queues behind itself."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """Hold `count` slots; one tenant gets all but one at most (one where there is only one)."""

    def __init__(self, count: int):
        self._free = count
        self._most = max(1, count - 1)
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Return the number of jobs that wait for a slot."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """Hold a slot while in the block; waiting tenants get theirs in turn."""
        await self._take(tenant)
        try:
            yield
        finally:
            self._give_back(tenant)

    async def _take(self, tenant: str) -> None:
        if tenant not in self._waiting and self._may(tenant):
            self._grant(tenant)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(tenant)  # granted and cancelled in one iteration of the event loop
            else:
                self._forget(tenant, turn)
            raise

    def _may(self, tenant: str) -> bool:
        return self._free > 0 and self._held[tenant] < self._most

    def _grant(self, tenant: str) -> None:
        self._free -= 1
        self._held[tenant] += 1

    def _give_back(self, tenant: str) -> None:
        self._free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._grant_next()

    def _forget(self, tenant: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(tenant)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[tenant]

    def _grant_next(self) -> None:
        for tenant in list(self._waiting):
            while self._may(tenant) and (turns := self._waiting.get(tenant)):
                turn = turns.popleft()
                if turns:
                    self._waiting.move_to_end(tenant)
                else:
                    del self._waiting[tenant]
                if not turn.done():
                    self._grant(tenant)
                    turn.set_result(None)
                    break
