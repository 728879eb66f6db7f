"""Keep videos of tenants: OpenAI's video object, what is needed to make it, and its files."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator
from typing import Any, Literal

import msgspec
from msgspec import Struct

from motet_gateway.files.store import PART, FileStore, StoredFile, new_id
from motet_gateway.http.problems import NotFound
from motet_gateway.storage.documents import JetStreamDocuments
from motet_gateway.storage.quota import Stored
from motet_gateway.storage.records import missing, read_record
from motet_shared.messages import VideoForm

SCHEMA = 1  # version of what is stored; increase it with a change that older versions cannot read
MOST = 1000  # videos of a tenant
_ID = re.compile(r"video_[0-9a-f]{24}")

Status = Literal["queued", "in_progress", "completed", "failed"]
OVER: tuple[Status, ...] = ("completed", "failed")


class Video(Struct, kw_only=True, omit_defaults=True):
    """A video as it is stored. `at` has the times of its creation and end in Unix seconds.

    image, content, preview: the files that it begins with, that it is, and of its newest preview.
    """

    version: int = SCHEMA
    id: str
    model: str
    prompt: str
    negative_prompt: str = ""
    seconds: float = 0.0
    size: str = "auto"
    seed: int
    steps: int = 0
    guidance_scale: float | None = None
    created_at: int
    expires_at: int
    completed_at: int | None = None
    status: Status = "queued"
    progress: int = 0  # percent
    error: dict[str, str | None] | None = None
    format: VideoForm = "mp4"
    remixed_from: str | None = None
    image: StoredFile | None = None
    content: StoredFile | None = None
    preview: StoredFile | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return OpenAI's video object."""
        error = self.error
        return {
            "id": self.id,
            "object": "video",
            "model": self.model,
            "prompt": self.prompt,
            "status": self.status,
            "progress": self.progress,
            "seconds": f"{self.seconds:g}" if self.seconds else "auto",
            "size": self.size,
            "seed": self.seed,
            "output_format": self.format,
            "created_at": self.created_at,
            "completed_at": self.completed_at,
            "expires_at": self.expires_at,
            "remixed_from_video_id": self.remixed_from,
            "error": error and {"code": error["code"], "message": error["message"]},
        }


_video = msgspec.json.Decoder(Video).decode


class VideoStore:
    """Keep the videos of all tenants. Every method raises Unavailable if the store is away.

    The record of a video that is not over is replaced by its revision: so one gateway at a time
    makes it, and one that was deleted stays deleted.
    """

    def __init__(self, documents: JetStreamDocuments, stored: Stored, ttl: float):
        self._documents, self.ttl = documents, ttl
        self.files = FileStore(documents, stored, ttl)

    async def create(self, owner: str, video: Video) -> None:
        """Store a new video, which counts as open until `close`."""
        await self._documents.put(owner, f"open.{video.id}", b"")
        await self._documents.put(owner, f"videos.{video.id}", msgspec.json.encode(video))

    async def get(self, owner: str, video_id: str) -> Video:
        """Return a video. Raises NotFound if this tenant has none of that id."""
        what = f"video {video_id[:80]!r}"
        if not _ID.fullmatch(video_id):
            raise missing(what)
        return await read_record(
            self._documents, owner, f"videos.{video_id}", _video, what=what, schema=SCHEMA
        )

    async def revision(self, owner: str, video_id: str) -> int | None:
        """Return the revision of a video's record; None if it was deleted."""
        try:
            return (await self._documents.read(owner, f"videos.{video_id}"))[1]
        except NotFound:
            return None

    async def revision_of(self, owner: str, video: Video) -> int | None:
        """Return the revision of a record if it equals this one; None if it does not, or is gone."""
        try:
            data, revision = await self._documents.read(owner, f"videos.{video.id}")
        except NotFound:
            return None
        return revision if data == msgspec.json.encode(video) else None

    async def replace(self, owner: str, video: Video, revision: int) -> int | None:
        """Store what is known of a video, and return the new revision.

        Returns None if it was deleted, or another gateway has begun to make it.
        """
        data = msgspec.json.encode(video)
        return await self._documents.replace(owner, f"videos.{video.id}", data, revision)

    async def close(self, owner: str, video_id: str) -> None:
        """Count a video as open no longer."""
        await self._documents.delete(owner, f"open.{video_id}")

    async def ids(self, owner: str, kind: str = "videos") -> list[str]:
        """Return the ids of a tenant's videos, or of its open ones, the oldest first."""
        names = await self._documents.names(owner, kind)
        return [name.removeprefix(f"{kind}.") for name in names]

    async def delete(self, owner: str, video: Video) -> None:
        """Delete a video and its files; a gateway that makes it notices."""
        await self._documents.delete(owner, f"videos.{video.id}")
        await self.close(owner, video.id)
        for file in (video.image, video.content, video.preview):
            if file is not None:
                await self.files.delete(owner, file)

    async def write(self, owner: str, name: str, data: bytes) -> StoredFile:
        """Store a file of a video. Raises QuotaExceeded if the tenant stores too much."""
        await self.files.check_room(owner, len(data))
        now = int(time.time())
        file = StoredFile(
            id=new_id("file-"),
            bytes=0,
            parts=0,
            created_at=now,
            filename=name,
            purpose="video",
            expires_at=now + int(self.ttl),
        )
        return await self.files.write(owner, file, _parts(data))

    async def read(self, owner: str, file: StoredFile) -> bytes:
        """Return a file of a video."""
        return b"".join([part async for part in self.files.read(owner, file)])


async def _parts(data: bytes) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(data), PART):
        yield data[start : start + PART]
