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
        self, image_embeddings: Sequence[messages.ImageEmbeddingRef]
    ) -> AsyncIterator[list[ImageEmbedding]]:
        """Hold the image embeddings of a request within the block.

        Raises BadRequest for a blob that is no embedding or a request above the capacity,
        Overloaded while there is no room, and BlobError for a blob that is gone.
        """
        nbytes = sum(embedding.embeddings.nbytes for embedding in image_embeddings)
        for number, embedding in enumerate(image_embeddings):
            _check(embedding, number)
        if nbytes > self._capacity:
            message = (
                f"image_embeddings: take {nbytes} bytes; at most {self._capacity} (--image-memory)"
            )
            message += " are held; send fewer images"
            raise BadRequest(message, param="image_embeddings")
        if self.held + nbytes > self._capacity:
            raise Overloaded(
                f"images of running requests take {self.held} of {self._capacity} bytes; try later"
            )
        self.held += nbytes
        try:
            yield [
                ImageEmbedding(
                    await self._read(embedding), embedding.name, embedding.grid, embedding.interval
                )
                for embedding in image_embeddings
            ]
        finally:
            self.held -= nbytes

    async def _read(self, embedding: messages.ImageEmbeddingRef) -> Tensor:
        ref = embedding.embeddings
        data = await self._store.get(ref, release=False)
        return torch.frombuffer(data, dtype=torch.float32).view(ref.shape)


def _check(embedding: messages.ImageEmbeddingRef, number: int) -> None:
    ref, where = embedding.embeddings, f"image_embeddings[{number}].embeddings"
    if ref.dtype != "float32" or len(ref.shape) != 3 or not ref.nbytes:
        raise BadRequest(
            f"{where}: is {ref.dtype} {list(ref.shape)}; give float32 [layers, tokens, hidden]",
            param=where,
        )
