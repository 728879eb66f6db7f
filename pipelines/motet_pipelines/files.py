"""A sound file on its way to a service: lent to the instance that reads it, and to nobody else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from motet_shared.blobs import BlobStore
from motet_shared.messages import BlobRef

_TTL = 60.0  # seconds in which it is fetched, or not at all

Bytes = bytes | memoryview


@asynccontextmanager
async def lent(store: BlobStore, data: Bytes, instance: str) -> AsyncIterator[BlobRef]:
    """The file in `store`, while in the block."""
    ref = await store.put_async(data, readers=[instance], ttl=_TTL)
    try:
        yield ref
    finally:
        store.drop(ref)
