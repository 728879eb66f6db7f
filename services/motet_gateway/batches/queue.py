"""Keep the batches that are not over, and give each to one gateway at a time by a lease.

A lease is an entry of a bucket whose entries expire. The gateway that holds it replaces it in time;
if that gateway dies, or is cut off from the store, another one can take it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import nats.js.errors

from motet_gateway.storage.jetstream import ERRORS, TIMEOUT, key_value, unavailable

from .cancelled import is_cancelled

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js import JetStreamContext
    from nats.js.kv import KeyValue

_QUEUE, _LEASES = "motet_batches", "motet_batch_leases"
_NO_OWNER = "-"  # in a key, in place of the empty name; no tenant has this name
_MARGIN = 0.25  # share of a lease's time that is left when its holder stops


@dataclass(frozen=True, slots=True, order=True)
class QueuedBatch:
    """Name a batch that is not over. Those of a tenant sort by age."""

    owner: str
    id: str

    @property
    def key(self) -> str:
        return f"{self.owner or _NO_OWNER}.{self.id}"

    @classmethod
    def of(cls, key: str) -> QueuedBatch:
        owner, _, batch_id = key.rpartition(".")
        return cls("" if owner == _NO_OWNER else owner, batch_id)


class BatchQueue:
    """Queue batches, on disk. `patience`: seconds after which a lease expires."""

    def __init__(self, js: JetStreamContext, keys: KeyValue, leases: KeyValue, patience: float):
        self._js, self._keys, self._leases = js, keys, leases
        self._patience = patience
        self.added = asyncio.Event()  # set when a batch was added and stored here

    @classmethod
    async def open(cls, client: Client, ttl: float, patience: float) -> BatchQueue:
        """Create or reuse the queue. `ttl`: seconds that a batch stays in it at most."""
        js = client.jetstream(timeout=TIMEOUT)
        keys = await key_value(js, _QUEUE, ttl)
        leases = await key_value(js, _LEASES, patience)
        # The setting of the gateway that created the bucket is the one that counts.
        return cls(js, keys, leases, (await leases.status()).ttl or patience)

    async def add(self, batch: QueuedBatch) -> None:
        """Append a batch. Raises Unavailable if the store does not answer."""
        try:
            await self._keys.put(batch.key, b"")
        except ERRORS as error:
            raise unavailable("the batch cannot be queued", error) from None

    async def waiting(self) -> list[QueuedBatch]:
        """Return the batches that no gateway runs, in their order. Raises one of ERRORS.

        First come those of the tenants of which the fewest run or are before them, then the oldest.
        """
        leased = await self._listed(_LEASES)
        running = Counter(batch.owner for batch in leased)
        turns: list[tuple[int, str, QueuedBatch]] = []
        for batch in sorted(await self._listed(_QUEUE) - leased):
            turns.append((running[batch.owner], batch.id, batch))
            running[batch.owner] += 1
        return [batch for *_, batch in sorted(turns)]

    async def _listed(self, bucket: str) -> set[QueuedBatch]:
        subject = f"$KV.{bucket}."
        info = await self._js.stream_info(f"KV_{bucket}", subjects_filter=f"{subject}>")
        found = info.state.subjects or ()
        return {QueuedBatch.of(key.removeprefix(subject)) for key in found}

    async def remove(self, batch: QueuedBatch) -> None:
        """Remove a batch that is over. Raises Unavailable if the store does not answer."""
        try:
            await _purge(self._js, _QUEUE, batch.key)
        except ERRORS as error:
            raise unavailable("the batch cannot be removed from the queue", error) from None

    async def take(self, batch: QueuedBatch) -> Lease | None:
        """Return the lease of a batch, None if another gateway has it. Raises one of ERRORS."""
        taken_at = time.monotonic()
        try:
            revision = await self._leases.create(batch.key, b"")
        except (nats.js.errors.KeyWrongLastSequenceError, nats.js.errors.KeyNotFoundError):
            return None  # not found: it expired while it was read; the next try takes it
        return Lease(self._js, self._leases, batch.key, revision, self._patience, taken_at)


class Lease:
    """Hold the right to run a batch until it is released or lost."""

    def __init__(
        self,
        js: JetStreamContext,
        leases: KeyValue,
        key: str,
        revision: int,
        patience: float,
        taken_at: float,
    ):
        self._js, self._leases, self._key, self._revision = js, leases, key, revision
        self._patience, self._renewed_at = patience, taken_at

    @property
    def is_held(self) -> bool:
        """Return True while no other gateway can have it."""
        return time.monotonic() - self._renewed_at < self._patience * (1 - _MARGIN)

    async def lost(self) -> None:
        """Renew the lease; return once it is lost."""
        while self.is_held and not is_cancelled():
            await asyncio.sleep(self._patience / 10)
            started = time.monotonic()
            try:
                async with asyncio.timeout(self._patience / 3):
                    self._revision = await self._replace()
            except nats.js.errors.KeyWrongLastSequenceError:
                # It expired, another gateway has it, or the answer to the last renewal was lost.
                return
            except ERRORS:
                continue
            self._renewed_at = started

    def _replace(self) -> Awaitable[int]:
        return self._leases.update(self._key, b"", last=self._revision)

    async def release(self) -> None:
        """Let another gateway take it at once; one that is lost expires by itself."""
        if self.is_held:
            with suppress(*ERRORS):
                await _purge(self._js, _LEASES, self._key)


async def _purge(js: JetStreamContext, bucket: str, key: str) -> None:
    """Delete a key; unlike a bucket's own deletion, this leaves no mark behind."""
    await js.purge_stream(f"KV_{bucket}", subject=f"$KV.{bucket}.{key}")
