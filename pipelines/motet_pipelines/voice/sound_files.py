"""Lend a file to the one instance that reads it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from motet_shared.blobs.store import BlobStore
from motet_shared.messages import BlobRef

_TTL = 60.0  # seconds within which the instance fetches the file

Bytes = bytes | memoryview


@asynccontextmanager
async def lent(store: BlobStore, data: Bytes, instance: str) -> AsyncIterator[BlobRef]:
    """Keep the file in `store` for `instance` while in the block; yield its reference."""
    ref = await store.put_async(data, readers=[instance], ttl=_TTL)
    try:
        yield ref
    finally:
        store.drop(ref)
