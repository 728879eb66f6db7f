"""Limit use over time with token buckets, to the nanosecond, with holds for running requests.

A bucket begins full, may be emptied at once and fills evenly. A request first holds what it will
probably use, which must be available; use beyond that is charged as it occurs, into debt if need
be, so that the rate is kept over time even where use cannot be known beforehand. All arithmetic is
in integers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

NANOSECONDS = 1_000_000_000
Clock = Callable[[], int]  # monotonic nanoseconds


class Counter(Protocol):
    """Describe a Prometheus counter with its labels set."""

    def inc(self, amount: float = 1) -> None: ...


class Bucket:
    """Refill `limit` units per `period` seconds."""

    __slots__ = ("_at", "_clock", "_credit", "_unit", "limit", "period")

    def __init__(self, limit: int, period: int, clock: Clock = time.monotonic_ns):
        self.limit, self.period, self._clock = limit, period, clock
        self._unit = (
            period * NANOSECONDS
        )  # credit of one unit; `limit` of credit is added per nanosecond
        self._credit = limit * self._unit
        self._at = clock()

    @property
    def level(self) -> int:
        """Return the whole units available; below 0: debt."""
        return self._filled() // self._unit

    @property
    def full_in(self) -> int:
        """Return the nanoseconds until the bucket is full, if nothing is taken."""
        return self._time(self.limit * self._unit - self._filled())

    def wait(self, amount: int) -> int:
        """Return the nanoseconds until `amount` is available, 0 if it is.

        More than `limit` is never available, so a full bucket is enough for such an amount.
        """
        if not self.limit:
            return self.period * NANOSECONDS if amount else 0  # a limit of 0 never refills
        return self._time(min(amount, self.limit) * self._unit - self._filled())

    def charge(self, amount: int) -> None:
        """Take `amount`, whether or not it is available; a negative amount is given back."""
        self._credit = min(self._filled() - amount * self._unit, self.limit * self._unit)

    def resize(self, limit: int) -> None:
        """Change the limit. What was used still counts."""
        self._credit = min(self._filled() + (limit - self.limit) * self._unit, limit * self._unit)
        self.limit = limit

    def _filled(self) -> int:
        now = self._clock()
        self._credit = min(self._credit + (now - self._at) * self.limit, self.limit * self._unit)
        self._at = now
        return self._credit

    def _time(self, lack: int) -> int:
        return -(-lack // self.limit) if lack > 0 and self.limit else 0


class Account(Protocol):
    """Describe what shares a resource of a tenant with other gateways."""

    bucket: Any

    def bucket_of(self, limit: int, period: int, clock: Clock) -> Bucket: ...

    def count(self, amount: float) -> None: ...

    async def fetch(self, amount: int) -> None: ...


class Allowance:
    """Account for one resource of a tenant: counted, and limited if there is a bucket.

    account: shares it with other gateways; None: this one counts for itself.
    """

    __slots__ = ("_clock", "_counter", "account", "bucket", "kind", "scale")

    def __init__(self, kind: str, counter: Counter, scale: int = 1):
        self.kind = kind  # name of the resource in errors and headers
        self.bucket: Bucket | None = None
        self.account: Account | None = None
        self._counter, self.scale = counter, scale  # bucket units per counted unit
        self._clock: Clock = time.monotonic_ns

    def share(self, account: Account) -> None:
        """Use a bucket that all gateways share from now on."""
        self.account = account
        if self.bucket is not None:
            self.bucket = account.bucket_of(self.bucket.limit, self.bucket.period, self._clock)

    def bound(self, limit: int | None, period: int, clock: Clock) -> None:
        """Change the limit; None: unlimited."""
        self._clock = clock
        if limit is None:
            self.bucket = None
            if self.account is not None:
                self.account.bucket = None
        elif self.bucket is None:
            make = Bucket if self.account is None else self.account.bucket_of
            self.bucket = make(limit * self.scale, period, clock)
        else:
            self.bucket.resize(limit * self.scale)

    def wait(self, amount: int) -> int:
        """Return the nanoseconds until `amount` may be used."""
        return 0 if self.bucket is None else self.bucket.wait(amount)

    def hold(self, amount: int) -> Hold:
        return Hold(self, amount)

    def charge(self, amount: int) -> None:
        if self.bucket is not None:
            self.bucket.charge(amount)

    def count(self, amount: int) -> None:
        self._counter.inc(amount / self.scale)
        if self.account is not None:
            self.account.count(amount)

    async def fetch(self, amount: int) -> None:
        """Have `amount` here if it is shared with other gateways and they leave as much."""
        if self.account is not None and amount:
            await self.account.fetch(amount)


class Hold:
    """Hold an amount that was taken in advance, and count how much of it is used."""

    __slots__ = ("_allowance", "_held", "used")

    def __init__(self, allowance: Allowance, amount: int):
        bucket = allowance.bucket
        self._allowance = allowance
        self._held = amount if bucket is None else min(amount, bucket.limit)
        self.used = 0
        allowance.charge(self._held)

    def use(self, amount: int) -> None:
        """Count use; a negative amount takes some of it back.

        Use beyond the hold is charged at once.
        """
        self.used += amount
        if self.used > self._held:
            self._allowance.charge(self.used - self._held)
            self._held = self.used

    def trim(self) -> None:
        """Give back what was not used so far; it is not counted yet."""
        self._allowance.charge(self.used - self._held)
        self._held = self.used

    def settle(self) -> None:
        """Give back what was not used, and count the rest. A second call does nothing."""
        self.trim()
        self._allowance.count(self.used)
        self._held = self.used = 0
