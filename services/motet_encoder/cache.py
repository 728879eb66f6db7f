"""Cache image embeddings by the content of the picture, evicting the least recently used.

They lie in the process's blob store, where readers find them: a cached picture costs one table
look-up. A reader that comes too late finds the blob gone and requests the picture again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from torch import Tensor

from motet_shared.blobs.store import BlobStore
from motet_shared.errors import Overloaded, PayloadTooLarge
from motet_shared.messages import EncodedImage, ImageEmbeddingRef

_READERS = 1 << 30  # no limit in practice: a blob lives until the cache drops it
_TTL = 1e9  # seconds; no limit in practice


class EmbeddingCache:
    """Keep image embeddings in `store`, which holds nothing else."""

    def __init__(self, store: BlobStore):
        self._store = store
        self._seen: OrderedDict[str, EncodedImage] = OrderedDict()
        self._put_lock = asyncio.Lock()
        self.hits = self.misses = self.evictions = 0

    def get(self, name: str) -> EncodedImage | None:
        """Return an image's embeddings by name; None if they are not cached."""
        encoded = self._seen.get(name)
        if encoded is None:
            self.misses += 1
            return None
        self.hits += 1
        self._seen.move_to_end(name)
        return encoded

    async def put(
        self,
        name: str,
        embeddings: Tensor,
        ids: list[int],
        grid: tuple[int, ...],
        interval: float = 1.0,
    ) -> EncodedImage:
        """Add the embeddings of a picture, evicting others to make room.

        Raises PayloadTooLarge for a picture that is larger than the whole cache.
        """
        async with self._put_lock:
            nbytes = embeddings.nbytes
            if nbytes > self._store.capacity:
                raise PayloadTooLarge(
                    f"image: its {embeddings.shape[1]} tokens take {nbytes} bytes, the encoder service holds "
                    f"{self._store.capacity} (--cache-memory); give a lower `max_pixels`",
                    param="max_pixels",
                )
            if (known := self._seen.get(name)) is not None:  # another call was faster
                return known
            data = embeddings.contiguous().numpy().data.cast("B")
            while True:
                try:
                    ref = await self._store.put_async(
                        data,
                        "float32",
                        tuple(embeddings.shape),
                        wait=0.0,
                        readers=_READERS,
                        ttl=_TTL,
                        digest=False,
                    )
                    break
                except Overloaded:
                    if not self._seen:
                        raise
                    self._evict_oldest()
            encoded = self._seen[name] = EncodedImage(
                ImageEmbeddingRef(embeddings=ref, name=name, grid=grid, interval=interval), ids
            )
            return encoded

    def _evict_oldest(self) -> None:
        _, oldest = self._seen.popitem(last=False)
        self._store.drop(oldest.embedding.embeddings)
        self.evictions += 1

    def stats(self) -> dict[str, int]:
        """Return the number of cached images, their bytes and counts since the start."""
        return {
            "cached": len(self._seen),
            "cache_hits": self.hits,
            "cache_misses": self.misses,
            "cache_evictions": self.evictions,
        }
