"""A sound file on its way to a service: lent to the instance that reads it, and to nobody else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from motet_shared.blobs import BlobStore
from motet_shared.messages import BlobRef, End

_TTL = 60.0  # seconds in which it is fetched, or not at all

Bytes = bytes | memoryview


@dataclass(slots=True)
class Outcome:
    """How a request about a file went."""

    instance: str | None = None
    moves: int = 0
    end: End | None = None


@asynccontextmanager
async def lent(store: BlobStore, data: Bytes, instance: str) -> AsyncIterator[BlobRef]:
    """The file in `store`, while in the block."""
    ref = await store.put_async(data, readers=[instance], ttl=_TTL)
    try:
        yield ref
    finally:
        store.drop(ref)
