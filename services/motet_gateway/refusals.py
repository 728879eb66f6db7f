"""How late a tenant is told that it was refused: the later, the less it waits between two tries.

A request that is refused has been read and looked through like any other. Clients that try again at once, whatever
`Retry-After` says, would take the gateway from all other tenants.
"""

from __future__ import annotations

import time

from .buckets import NANOSECONDS, Clock

AT_ONCE = 20  # refusals in a row that are told at once
APART = NANOSECONDS // 20  # from one to the next beyond those
LONGEST = 2 * NANOSECONDS  # that a refusal is kept back


class Refusals:
    """Of one tenant."""

    __slots__ = ("_clock", "_next")

    def __init__(self, clock: Clock = time.monotonic_ns):
        self._clock = clock
        self._next = clock() - AT_ONCE * APART  # when the next is due, if there was no hurry

    def delay(self) -> float:
        """Seconds after which one more refusal is to be told."""
        now = self._clock()
        due = min(max(self._next, now - AT_ONCE * APART), now + LONGEST)
        self._next = due + APART
        return max(0, due - now) / NANOSECONDS
