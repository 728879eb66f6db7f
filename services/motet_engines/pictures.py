"""Read the files of a request's pictures, within a bound on the memory of all requests together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from motet_shared.blobs.store import BlobStore
from motet_shared.errors import BadRequest, Overloaded, PayloadTooLarge
from motet_shared.messages import Generate, Image

# First bytes of the formats that are accepted anywhere in Motet (`motet_media.picture`).
_TYPES = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
    b"II*\0": "image/tiff",
    b"MM\0*": "image/tiff",
}


@dataclass(frozen=True, slots=True)
class Picture:
    """Hold one picture as the client sent it: the file, its most pixels (0: any), and its field."""

    file: bytes
    max_pixels: int
    param: str

    @property
    def media_type(self) -> str:
        """Return the type that the file's first bytes tell. Raises BadRequest for no picture."""
        if self.file[:4] == b"RIFF" and self.file[8:12] == b"WEBP":
            return "image/webp"
        for start, name in _TYPES.items():
            if self.file.startswith(start):
                return name
        raise BadRequest(
            f"{self.param}: is no picture; send PNG, JPEG, WebP, GIF, BMP or TIFF", param=self.param
        )


class PictureFiles:
    """Fetch pictures as blobs. `capacity`: bytes of files that all requests together may hold."""

    def __init__(self, store: BlobStore, capacity: int):
        self._store = store
        self._capacity = capacity
        self._held = 0

    async def start(self) -> None:
        await self._store.start()

    async def close(self) -> None:
        await self._store.close()

    @asynccontextmanager
    async def reading(self, request: Generate) -> AsyncIterator[list[Picture]]:
        """Hold the pictures of a request within the block; none for one without.

        Raises PayloadTooLarge for a request above the capacity, Overloaded while there is no room,
        BlobError for a file that is gone.
        """
        images = request.chat.images if request.chat is not None else []
        nbytes = sum(image.file.nbytes for image in images)
        if nbytes > self._capacity:
            raise PayloadTooLarge(
                f"messages: the pictures have {nbytes} bytes; at most {self._capacity} are read"
                " (--image-memory); send fewer or smaller ones",
                param="messages",
            )
        if self._held + nbytes > self._capacity:
            raise Overloaded(
                f"pictures of running requests take {self._held} of {self._capacity} bytes; try later"
            )
        self._held += nbytes
        try:
            yield [await self._read(image) for image in images]
        finally:
            self._held -= nbytes

    async def _read(self, image: Image) -> Picture:
        data = await self._store.get(image.file, release=False)
        return Picture(bytes(data), image.max_pixels, image.param or "messages")

    def check_integrity(self) -> None:
        """Raise RuntimeError unless all pictures are freed."""
        if self._held:
            raise RuntimeError(f"no call is active, but pictures take {self._held} bytes")
