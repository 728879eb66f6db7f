"""Fetch, decode and scale the pictures of a request.

Files are decoded in confined child processes (`motet_media`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from motet_media.pictures import open_picture
from motet_media.pool import decoding
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import BadRequest, Overloaded, PayloadTooLarge, UnsupportedParameter
from motet_shared.messages import Image
from motet_shared.wire.bus import Bus

from .config import EmbeddingConfig
from .pictures import PictureEncoder
from .texts import Picture

_THREADS = 2  # decoded pictures at a time: they are large


class PictureReader:
    """Read pictures for a model that takes them."""

    def __init__(self, config: EmbeddingConfig, bus: Bus):
        self._config = config
        self._store = BlobStore.of(config, bus)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="prepare")
        self._slots = asyncio.Semaphore(_THREADS)
        self._reading = 0  # pictures of all requests that are being read

    async def start(self) -> None:
        """Make ready to fetch files."""
        await self._store.start()

    async def close(self) -> None:
        """Stop; pictures that are being read are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._store.close()

    async def read(self, images: Sequence[Image], model: Any, queued: int) -> list[Picture]:
        """Return the pictures in the size of `model`, in order.

        queued: texts and pictures in the queue of the engine.

        Raises UnsupportedParameter if the model takes no pictures, BadRequest or PayloadTooLarge
        for a file that cannot be read, BlobError for one that is gone, Overloaded if these pictures
        do not fit into the queue beside the others.
        """
        if not images:
            return []
        if not isinstance(model, PictureEncoder):
            raise UnsupportedParameter(
                f"{images[0].param or 'input'}: this model embeds texts only; send text",
                param=images[0].param or "input",
            )
        self._check_room(len(images), queued)
        # A request waits for a few slots at a time, so that its list does not hold up the others.
        turns = asyncio.Semaphore(_THREADS)
        self._reading += len(images)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(image, model, turns)) for image in images]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._reading -= len(images)
        return [task.result() for task in tasks]

    def _check_room(self, count: int, queued: int) -> None:
        held, most = queued + self._reading, self._config.max_waiting
        if held + count > most:
            raise Overloaded(
                f"{held} texts and pictures wait and {count} more would exceed max_waiting={most}; "
                "try again in a moment"
            )

    async def _one(self, image: Image, model: PictureEncoder, turns: asyncio.Semaphore) -> Picture:
        param = image.param or "input"
        if image.file.nbytes > self._config.max_file:
            raise PayloadTooLarge(
                f"{param}: the file has {image.file.nbytes} bytes; at most {self._config.max_file} "
                "are read",
                param=param,
            )
        async with turns, self._slots:
            data = await self._store.get(image.file, release=False)
            most = self._config.max_picture
            return await decoding(_prepare, model, bytes(data), most, param, executor=self._threads)


def _prepare(model: PictureEncoder, data: bytes, most: int, param: str) -> Picture:
    picture = open_picture(data, max_pixels=most, param=param)
    try:
        return model.prepare(picture)
    except ValueError as error:
        size = f"{picture.width}×{picture.height}"
        raise BadRequest(
            f"{param}: this model cannot encode {size} pixels: {error}", param=param
        ) from error
