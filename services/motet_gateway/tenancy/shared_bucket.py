"""Share the limits and the use of tenants among gateways: leases of buckets that NATS keeps.

The bucket of a tenant lies in JetStream (`storage.counts`). A gateway takes a lease out of it, a
`LEASES`th of the limit beyond what a request needs, serves from it without asking, and gives back
what it does not need. What no gateway has leased refills evenly, as in a `Bucket`. So all gateways
together let a tenant have at most `1 + gateways / LEASES` times its limit, and refuse it at least
`1 - gateways / LEASES` of it; what is used beyond its hold is debt as everywhere.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from dataclasses import dataclass

from motet_gateway.storage.counts import IDLE, LEASES, Count, SharedCounts

from .buckets import NANOSECONDS, Bucket, Clock
from .counters import TenantCounters
from .slots import SlotLease, Slots

SYNC_EVERY = 1.0  # seconds between two reports of what was used
_SHORTEST_WAIT = NANOSECONDS // 10
_MOST_TRIED = 32  # changes of a count without an answer that are remembered, the newest


class SharedBucket(Bucket):
    """A gateway's part of a bucket.

    It has what it has leased, and knows what was left for all when it last asked. Requests that cannot
    wait for an answer of NATS may take of that, which is a debt until the next exchange.
    """

    __slots__ = ("_known", "_known_at", "held")

    def __init__(self, limit: int, period: int, clock: Clock = time.monotonic_ns):
        super().__init__(limit, period, clock)
        self.held = 0.0  # units leased and not used; below 0: debt
        # Units that no gateway had leased at `_known_at`; None: NATS was not asked, or is away.
        self._known: float | None = None
        self._known_at = clock()

    @property
    def level(self) -> int:
        return int(self.held + self._left())

    @property
    def full_in(self) -> int:
        return self._time_for(self.limit - self.held - self._left())

    def wait(self, amount: int) -> int:
        if not self.limit:
            return self.period * NANOSECONDS if amount else 0
        lack = min(amount, self.limit) - self.held
        return self._time_for(lack - self._left()) if lack > 0 else 0

    def charge(self, amount: int) -> None:
        self.held -= amount

    def resize(self, limit: int) -> None:
        self._known, self.limit = None, limit

    @property
    def is_known(self) -> bool:
        """Return True if it is known what no gateway has leased."""
        return self._known is not None

    def has(self, amount: int) -> bool:
        """Return True if `amount` is leased."""
        return self.held >= min(amount, self.limit)

    def learn(self, left: float | None) -> None:
        """Note how many units no gateway has leased at present; None: that cannot be known."""
        self._known, self._known_at = left, self._clock()

    def is_due(self, *, is_idle: bool) -> bool:
        """Return True if there is a debt, or something to give back or to learn."""
        spare = 0 if is_idle else self.limit // LEASES
        return self.held < 0 or self.held > spare or not self.is_known

    def lease(self, count: Count, now: float, amount: int, *, is_idle: bool) -> tuple[float, float]:
        """Change a count by a lease for `amount`, or by what is given back.

        Returns the units that come here, negative if they go back, and those that are left.
        """
        refilled = max(now - count.at, 0.0) * self.limit / self.period
        count.taken = max(count.taken - refilled, 0.0)
        count.at = max(now, count.at)
        left = self.limit - count.taken
        due = min(amount, self.limit) - self.held
        spare = 0 if is_idle else self.limit // LEASES
        if due + spare <= 0:
            came = due + spare  # what is not needed goes back
        elif due <= left:
            came = min(due + spare, max(left, 0.0))
        else:
            came = 0.0
        came = max(came, -self.held)  # a debt is always reported
        count.taken = max(count.taken + came, 0.0)
        return came, self.limit - count.taken

    def _left(self) -> float:
        if self._known is None:
            return 0.0
        passed = (self._clock() - self._known_at) / NANOSECONDS
        return min(self._known + passed * self.limit / self.period, float(self.limit))

    def _time_for(self, lack: float) -> int:
        if lack <= 0 or not self.limit:
            return 0
        return max(int(lack * self.period * NANOSECONDS / self.limit), _SHORTEST_WAIT)


@dataclass(frozen=True, slots=True)
class _Tried:
    """Hold a change of a count: the units that it brings here, and those that it reports as used."""

    name: str
    came: float
    reported: float


class Account:
    """Exchange the use of one resource of one tenant with the other gateways.

    gateway: the instance of this one. scale: units of the bucket per unit that is counted.
    """

    def __init__(self, counts: SharedCounts, name: str, gateway: str, scale: int = 1):
        self.bucket: SharedBucket | None = None
        self.used = 0.0  # by all gateways, as far as is known here
        self._counts, self._name, self._gateway, self._scale = counts, name, gateway, scale
        self._unreported = 0.0
        self._tried: deque[_Tried] = deque(maxlen=_MOST_TRIED)  # of which no answer has come
        self._lock = asyncio.Lock()
        self._used_at = 0.0  # monotonic

    def bucket_of(self, limit: int, period: int, clock: Clock) -> SharedBucket:
        """Return a new bucket of this resource."""
        self.bucket = SharedBucket(limit, period, clock)
        return self.bucket

    def count(self, amount: float) -> None:
        """Count use, in units of the bucket."""
        self._unreported += amount
        self.used += amount / self._scale

    async def fetch(self, amount: int) -> None:
        """Lease `amount`, if it is not leased, and if there is as much.

        While NATS does not answer, what is leased is all that there is.
        """
        if self.bucket is None:
            return
        self._used_at = time.monotonic()
        if not self.bucket.has(amount):
            async with self._lock:
                if not self.bucket.has(amount):
                    await self._exchange(amount)

    async def report(self, *, is_last: bool = False) -> None:
        """Report what was used, and give back what is not needed; all of it if `is_last`."""
        is_idle = is_last or time.monotonic() - self._used_at > IDLE
        if self._unreported or (self.bucket is not None and self.bucket.is_due(is_idle=is_idle)):
            async with self._lock:
                await self._exchange(0, is_idle=is_idle)

    async def _exchange(self, amount: int, *, is_idle: bool = False) -> None:
        def change(count: Count) -> tuple[_Tried, float, float]:
            name = count.last_of(self._gateway)
            for tried in [one for one in self._tried if one.name == name]:
                self._take(tried)  # it was applied, though no answer has come
            bucket, came, left = self.bucket, 0.0, 0.0
            count.used += self._unreported / self._scale
            if bucket is not None:
                came, left = bucket.lease(count, time.time(), amount, is_idle=is_idle)
            trying = _Tried(secrets.token_hex(4), came, self._unreported)
            self._tried.append(trying)
            count.mark(self._gateway, trying.name)
            return trying, left, count.used

        found = await self._counts.exchange(self._name, Count, change)
        if found is None:
            if self.bucket is not None:
                self.bucket.learn(None)
            return
        made, left, used = found
        self._take(made)
        self.used = used + self._unreported / self._scale
        if self.bucket is not None:
            self.bucket.learn(left)

    def _take(self, made: _Tried) -> None:
        """Take in a change that is known to be applied; those before it never will be."""
        self._tried.clear()
        self._unreported -= made.reported
        if self.bucket is not None:
            self.bucket.held += made.came


class Accounts:
    """Hold all accounts of a gateway, and report them once a second. `gateway`: its instance."""

    def __init__(self, counts: SharedCounts, counters: TenantCounters, gateway: str):
        self._counts, self._counters, self._gateway = counts, counters, gateway
        self._accounts: dict[str, Account] = {}
        self._leases: dict[str, SlotLease] = {}
        self._task: asyncio.Task[None] | None = None

    def of(self, tenant: str, kind: str, scale: int) -> Account:
        """Return the account of a resource of a tenant."""
        kind = kind.replace(" ", "_")
        name = f"{tenant}.{kind}"
        if name not in self._accounts:
            account = self._accounts[name] = Account(self._counts, name, self._gateway, scale)
            self._counters.used.labels(tenant, kind).set_function(lambda: account.used)
        return self._accounts[name]

    def lease_of(self, tenant: str, kind: str, slots: Slots) -> SlotLease:
        """Return the lease of the slots of a tenant."""
        name = f"{tenant}.{kind}"
        if name not in self._leases:
            self._leases[name] = SlotLease(self._counts, name, self._gateway, slots)
        return self._leases[name]

    def start(self) -> None:
        self._task = asyncio.create_task(self._report(), name="usage")

    async def close(self) -> None:
        """Give back all leases."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for one in self._shared():
            await one.report(is_last=True)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(SYNC_EVERY)
            for one in self._shared():
                await one.report()

    def _shared(self) -> list[Account | SlotLease]:
        return [*self._accounts.values(), *self._leases.values()]
