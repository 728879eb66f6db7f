"""Account for the bytes that each tenant stores in JetStream: images, jobs, responses, files, voices.

Bytes are counted locally on each put, and read again from the store when a tenant is at its limit.
That accounts for expired and deleted entries and puts of other gateways, also after a restart.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from motet_gateway.http.problems import QuotaExceeded

from .jetstream import ERRORS, unavailable

READ_EVERY = (
    1.0  # least seconds between two reads of the store, which bounds the cost of client retries
)
# Seconds after which the store is read before a put, since other gateways also put entries.
STALE_AFTER = 30.0
# By the parameter that asks for something to be stored.
_REMEDIES = {
    "response_format": "wait until some of it has expired, or send b64_json",
    "audio_sample": "delete voices",
    "file": "delete files, or wait until some have expired",
    "Idempotency-Key": "wait until some of it has expired, or leave the header out",
    "store": "delete responses, or send `store: false`",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """Represent a stored item, under a name that is unique in the ledger.

    `owner` is the tenant's name, `size` is in bytes, `expires` in Unix seconds.
    """

    name: str
    owner: str
    size: int
    expires: float


class Stored:
    """Keep the ledger of stored entries.

    `sources` each yield all entries of one store; `meters` return the bytes of a tenant, given its
    name, in stores that know them. `limit_of` returns the most bytes of a tenant; None: no limit.
    """

    def __init__(
        self,
        limit_of: Callable[[str], int | None],
        clock: Callable[[], float] = time.time,
    ):
        self.sources: list[Callable[[], AsyncIterator[Entry]]] = []
        self.meters: list[Callable[[str], Awaitable[int]]] = []
        self._limit_of, self._clock = limit_of, clock
        self._entries: dict[str, Entry] = {}
        self._used: defaultdict[str, int] = defaultdict(int)
        self._pending: set[str] = set()  # being put; the store may not list them yet
        self._read_at = float("-inf")

    def used(self, owner: str) -> int:
        """Return the bytes that a tenant stores."""
        now = self._clock()
        for entry in [entry for entry in self._entries.values() if entry.expires <= now]:
            self.remove(entry.name)
        return self._used[owner]

    async def check(self, owner: str, size: int, param: str | None = None) -> None:
        """Raise QuotaExceeded, with `param`, unless the tenant may store `size` more bytes.

        Raises Unavailable if the store does not answer.
        """
        try:
            await self._check(owner, size, param)
        except ERRORS as error:
            raise unavailable("what this key has stored cannot be listed", error) from None

    async def _check(self, owner: str, size: int, param: str | None) -> None:
        limit = self._limit_of(owner)
        if limit is None:
            return
        if self._clock() - self._read_at > STALE_AFTER:
            await self.refresh()
        elsewhere = sum([await meter(owner) for meter in self.meters])
        if self.used(owner) + elsewhere + size <= limit:
            return
        await self.refresh()
        if (used := self.used(owner) + elsewhere) + size > limit:
            what = f"what this key has stored takes {used} bytes; {size} more would exceed the limit of {limit}"
            remedy = _REMEDIES.get(param or "", "wait until some of it has expired")
            raise QuotaExceeded(f"{what}; {remedy}", param=param)

    @contextmanager
    def putting(self, entry: Entry) -> Iterator[None]:
        """Count an entry that is put within the block; an exception reverts it."""
        self.add(entry)
        self._pending.add(entry.name)
        try:
            yield
        except BaseException:
            self.remove(entry.name)
            raise
        finally:
            self._pending.discard(entry.name)

    def add(self, entry: Entry) -> None:
        """Count an entry; it replaces one of the same name."""
        self.remove(entry.name)
        self._entries[entry.name] = entry
        self._used[entry.owner] += entry.size

    def remove(self, name: str) -> None:
        """Remove an entry; an unknown name is ignored."""
        if (entry := self._entries.pop(name, None)) is not None:
            self._used[entry.owner] -= entry.size

    async def refresh(self) -> None:
        """Read the store again, unless that was done less than READ_EVERY seconds ago."""
        now = self._clock()
        if now - self._read_at < READ_EVERY:
            return
        self._read_at = now
        known = self._entries.keys() - self._pending
        found = {entry.name: entry for read in self.sources async for entry in read()}
        for name in known - found.keys():  # entries put during the read stay
            self.remove(name)
        for entry in found.values():
            self.add(entry)
