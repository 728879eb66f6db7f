"""Limits over time: how much may be used per minute or hour, to the nanosecond, and what is held of it meanwhile.

A bucket begins full, may be emptied at once and fills evenly. Whoever begins something holds what it will probably
take, which must be there; what it takes beyond that is charged as it comes, into debt if need be, so that the rate is
kept over time even where nobody could know beforehand. All arithmetic is in integers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

NANOSECONDS = 1_000_000_000
Clock = Callable[[], int]  # monotonic nanoseconds


class Counter(Protocol):
    """Of Prometheus, with its labels."""

    def inc(self, amount: float = 1) -> None: ...


class Bucket:
    """`limit` units per `period` seconds."""

    __slots__ = ("_at", "_clock", "_credit", "_unit", "limit", "period")

    def __init__(self, limit: int, period: int, clock: Clock = time.monotonic_ns):
        self.limit, self.period, self._clock = limit, period, clock
        self._unit = period * NANOSECONDS  # credit of one unit: `limit` of credit come in a nanosecond
        self._credit = limit * self._unit
        self._at = clock()

    @property
    def level(self) -> int:
        """Whole units that are there; below 0: debt."""
        return self._filled() // self._unit

    @property
    def full_in(self) -> int:
        """Nanoseconds until it is full, if nothing is taken."""
        return self._time(self.limit * self._unit - self._filled())

    def wait(self, amount: int) -> int:
        """Nanoseconds until `amount` is there; 0: it is. More than `limit` never is, so a full bucket is enough."""
        if not self.limit:
            return self.period * NANOSECONDS if amount else 0  # nothing ever comes of nothing
        return self._time(min(amount, self.limit) * self._unit - self._filled())

    def charge(self, amount: int) -> None:
        """Take what is used, whether or not it is there; a negative amount comes back."""
        self._credit = min(self._filled() - amount * self._unit, self.limit * self._unit)

    def resize(self, limit: int) -> None:
        """Another limit from now on. What was used stays used."""
        self._credit = min(self._filled() + (limit - self.limit) * self._unit, limit * self._unit)
        self.limit = limit

    def _filled(self) -> int:
        now = self._clock()
        self._credit = min(self._credit + (now - self._at) * self.limit, self.limit * self._unit)
        self._at = now
        return self._credit

    def _time(self, lack: int) -> int:
        return -(-lack // self.limit) if lack > 0 and self.limit else 0


class Allowance:
    """One thing that a tenant uses: counted, and bounded where there is a bucket."""

    __slots__ = ("_counter", "_scale", "bucket", "kind")

    def __init__(self, kind: str, counter: Counter, scale: int = 1):
        self.kind = kind  # as clients are told
        self.bucket: Bucket | None = None
        self._counter, self._scale = counter, scale  # units of one that is counted

    def bound(self, limit: int | None, period: int, clock: Clock) -> None:
        """Another limit from now on; None: none."""
        if limit is None:
            self.bucket = None
        elif self.bucket is None:
            self.bucket = Bucket(limit * self._scale, period, clock)
        else:
            self.bucket.resize(limit * self._scale)

    def wait(self, amount: int) -> int:
        """Nanoseconds until `amount` may be used."""
        return 0 if self.bucket is None else self.bucket.wait(amount)

    def hold(self, amount: int) -> Hold:
        return Hold(self, amount)

    def charge(self, amount: int) -> None:
        if self.bucket is not None:
            self.bucket.charge(amount)

    def count(self, amount: int) -> None:
        self._counter.inc(amount / self._scale)


class Hold:
    """An amount that was taken in advance, and what of it has been used."""

    __slots__ = ("_allowance", "_held", "used")

    def __init__(self, allowance: Allowance, amount: int):
        bucket = allowance.bucket
        self._allowance = allowance
        self._held = amount if bucket is None else min(amount, bucket.limit)
        self.used = 0
        allowance.charge(self._held)

    def use(self, amount: int) -> None:
        """Count what is used; a negative amount takes some of it back. What exceeds the hold is charged at once."""
        self.used += amount
        if self.used > self._held:
            self._allowance.charge(self.used - self._held)
            self._held = self.used

    def settle(self) -> None:
        """Give back what was not used. A second call does nothing."""
        self._allowance.charge(self.used - self._held)
        self._allowance.count(self.used)
        self._held = self.used = 0
