"""Keep numbers that all gateways change in a JetStream bucket, each by compare and set."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec
import nats.js.errors
from msgspec import Struct

from .documents import NEVER
from .jetstream import ERRORS, TIMEOUT, key_value

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js.kv import KeyValue

log = logging.getLogger(__name__)

BUCKET = "motet_usage"
LEASES = 64  # leases into which a limit is divided; of a limit below, each takes what it needs
IDLE = 3.0  # seconds without use after which a lease is given back
_PATIENCE = 0.5  # seconds for an answer of NATS, while a request waits for it
_TRIES = 24
_AWAY = 2.0  # seconds without another try after NATS did not answer
_PAUSE = 0.02  # seconds, at most, after another gateway was first
_MARKED = 60.0  # seconds for which a count has the mark of a change, longer than until the next try

R = TypeVar("R")
Kept = TypeVar("Kept", bound=Struct)


class Count(Struct):
    """What tenants took of one resource.

    taken: units that were taken and have not been refilled, at the Unix time `at`. used: all units
    that were ever used. last: the name and the Unix time of each gateway's last change, for
    `_MARKED` seconds.
    """

    taken: float = 0.0
    at: float = 0.0
    used: float = 0.0
    last: dict[str, tuple[str, float]] = {}

    def mark(self, gateway: str, change: str) -> None:
        """Note a change of a gateway: one without an answer knows from it that it was applied."""
        now = time.time()
        self.last = {name: one for name, one in self.last.items() if now - one[1] < _MARKED}
        self.last[gateway] = (change, now)

    def last_of(self, gateway: str) -> str:
        """Return the last change of a gateway, "" if it is not known."""
        return self.last[gateway][0] if gateway in self.last else ""


class HeldSlots(Struct):
    """What gateways have leased of something that is counted at a time.

    by: slots of each gateway, and the Unix time at which it last said so.
    """

    by: dict[str, tuple[int, float]] = {}


class SharedCounts:
    """Read and change counts by their names. Raises one of `jetstream.ERRORS` while NATS is away."""

    def __init__(self, keys: KeyValue):
        self._away_until = 0.0  # monotonic time until which NATS is not asked again
        self._keys = keys

    @classmethod
    async def open(cls, client: Client) -> SharedCounts:
        """Create or reuse the bucket."""
        await key_value(client.jetstream(timeout=TIMEOUT), BUCKET, NEVER)
        return cls(await client.jetstream(timeout=_PATIENCE).key_value(BUCKET))

    async def exchange(self, name: str, of: type[Kept], change: Callable[[Kept], R]) -> R | None:
        """Change as `change` does, for a request that waits; return None while NATS is away."""
        if time.monotonic() < self._away_until:
            return None
        try:
            async with asyncio.timeout(2 * _PATIENCE):
                return await self.change(name, of, change)
        except ERRORS as error:
            log.warning("%s: the use of tenants is not shared: %s", name, error or "timeout")
            self._away_until = time.monotonic() + _AWAY
            return None

    async def change(self, name: str, of: type[Kept], change: Callable[[Kept], R]) -> R:
        """Store what `change` makes of a count of this type, and return its result.

        It is called again with a newer count where another gateway was first, so that it may change
        nothing but the count. Raises TimeoutError if others are first again and again.
        """
        for _ in range(_TRIES):
            count, revision = await self._read(name, of)
            result = change(count)
            try:
                await self._keys.update(name, msgspec.json.encode(count), last=revision)
            except nats.js.errors.KeyWrongLastSequenceError:
                await asyncio.sleep(random.uniform(0, _PAUSE))
                continue
            return result
        raise TimeoutError(f"{name} is changed by others without a pause")

    async def _read(self, name: str, of: type[Kept]) -> tuple[Kept, int]:
        try:
            entry = await self._keys.get(name)
        except nats.js.errors.KeyNotFoundError:
            return of(), 0
        return msgspec.json.decode(entry.value or b"{}", type=of), entry.revision or 0
