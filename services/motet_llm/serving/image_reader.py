"""Read image embeddings from blobs, within a bound on the memory of all requests together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import torch
from torch import Tensor

from motet_llm.models.image_embeddings import ImageEmbedding
from motet_shared import messages
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import BadRequest, Overloaded


class ImageEmbeddingReader:
    """Read image embeddings. `capacity`: bytes that all requests together may hold."""

    def __init__(self, store: BlobStore, capacity: int):
        self._store = store
        self._capacity = capacity
        self.held = 0

    @asynccontextmanager
    async def reading(
        self, sights: Sequence[messages.Sight]
    ) -> AsyncIterator[list[ImageEmbedding]]:
        """Hold the image embeddings of a request within the block.

        Raises BadRequest for a blob that is no embedding or a request above the capacity,
        Overloaded while there is no room, and BlobError for a blob that is gone.
        """
        nbytes = sum(sight.embeddings.nbytes for sight in sights)
        for number, sight in enumerate(sights):
            _check(sight, number)
        if nbytes > self._capacity:
            message = f"sights: take {nbytes} bytes; at most {self._capacity} (--image-memory)"
            message += " are held; send fewer images"
            raise BadRequest(message, param="sights")
        if self.held + nbytes > self._capacity:
            raise Overloaded(
                f"images of running requests take {self.held} of {self._capacity} bytes; try later"
            )
        self.held += nbytes
        try:
            yield [
                ImageEmbedding(await self._read(sight), sight.name, sight.grid, sight.interval)
                for sight in sights
            ]
        finally:
            self.held -= nbytes

    async def _read(self, sight: messages.Sight) -> Tensor:
        ref = sight.embeddings
        data = await self._store.get(ref, release=False)
        return torch.frombuffer(data, dtype=torch.float32).view(ref.shape)


def _check(sight: messages.Sight, number: int) -> None:
    ref, where = sight.embeddings, f"sights[{number}].embeddings"
    if ref.dtype != "float32" or len(ref.shape) != 3 or not ref.nbytes:
        raise BadRequest(
            f"{where}: is {ref.dtype} {list(ref.shape)}; give float32 [layers, tokens, hidden]",
            param=where,
        )
