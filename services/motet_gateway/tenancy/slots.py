"""Count what a tenant has open at a time, such as replies, up to a limit that gateways share.

The slots of a tenant lie in JetStream (`storage.counts`): each gateway says there how many it has
leased. It leases what is open here and a `LEASES`th of the limit, keeps that while something is
open, and gives the rest back. A gateway that says nothing for `EXPIRY` has none any more. So what
waits for a lease is never more than the limit; what cannot wait takes of what was free when the
gateway last asked.
"""

from __future__ import annotations

import asyncio
import time

from motet_gateway.storage.counts import IDLE, LEASES, HeldSlots, SharedCounts

RENEW = 3.0  # seconds after which a gateway says again what it has
EXPIRY = 10.0  # seconds after which the lease of a gateway that says nothing is free


class Slots:
    """Count what is open here. `limit`: of all gateways that share it; None: unlimited."""

    __slots__ = ("lease", "limit", "open")

    def __init__(self, limit: int | None = None):
        self.limit = limit
        self.open = 0
        self.lease: SlotLease | None = None

    @property
    def free(self) -> int:
        """Return how many more may be opened now, of a limit."""
        if self.limit is None:
            raise RuntimeError("`free` of slots without a limit")
        most = self.limit if self.lease is None else self.lease.most
        return max(most - self.open, 0)

    def has(self, count: int) -> bool:
        """Return True if `count` more may be opened now."""
        return self.limit is None or count <= self.free

    async def fetch(self, count: int) -> None:
        """Lease `count` more, if slots are shared and as many are free.

        They are certain until the caller next waits for something.
        """
        if self.limit is not None and self.lease is not None:
            await self.lease.fetch(count)

    def close(self, count: int = 1) -> None:
        """Give `count` back."""
        self.open -= count


class SlotLease:
    """Exchange the slots of one tenant with the other gateways."""

    def __init__(self, counts: SharedCounts, name: str, gateway: str, slots: Slots):
        self._counts, self._name, self._gateway, self._slots = counts, name, gateway, slots
        self.leased = 0
        self._free: int | None = None  # that no gateway had when last asked; None: not known
        self._lock = asyncio.Lock()
        self._said_at = self._used_at = 0.0  # monotonic

    @property
    def most(self) -> int:
        """Return how many may be open here: the leased ones, and those that were free."""
        return self.leased + (self._free or 0)

    async def fetch(self, count: int) -> None:
        """Lease `count` beyond what is open. While NATS does not answer, no more are leased."""
        self._used_at = time.monotonic()
        if self._slots.open + count > self.leased:
            async with self._lock:
                if self._slots.open + count > self.leased:
                    await self._exchange(count)

    async def report(self, *, is_last: bool = False) -> None:
        """Say what is open and leased where that is due; `is_last`: lease nothing any more."""
        now, slots = time.monotonic(), self._slots
        is_idle = is_last or now - self._used_at > IDLE
        spare = 0 if is_idle else (slots.limit or 0) // LEASES
        is_old = self.leased > 0 and now - self._said_at > RENEW
        is_asked = slots.limit is not None and self._free is None
        if is_old or is_asked or not slots.open <= self.leased <= slots.open + spare:
            async with self._lock:
                await self._exchange(0, is_idle=is_idle)

    async def _exchange(self, count: int, *, is_idle: bool = False) -> None:
        def change(held: HeldSlots) -> tuple[int, int]:
            slots, now = self._slots, time.time()
            held.by = {
                name: one
                for name, one in held.by.items()
                if name != self._gateway and now - one[1] < EXPIRY
            }
            if slots.limit is None:
                return 0, 0
            left = max(slots.limit - sum(number for number, _ in held.by.values()), 0)
            due = slots.open + count
            spare = 0 if is_idle else slots.limit // LEASES
            leased = max(slots.open, min(due + spare, left) if due <= left else 0)
            if leased:
                held.by[self._gateway] = (leased, now)
            return leased, max(left - leased, 0)

        found = await self._counts.exchange(self._name, HeldSlots, change)
        if found is None:
            self._free = None
            return
        self.leased, self._free = found
        self._said_at = time.monotonic()
