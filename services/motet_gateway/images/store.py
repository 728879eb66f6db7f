"""Store images until they expire, and jobs until they are done, in NATS JetStream.

It is available if the NATS server has JetStream (`motet up --store FOLDER`). Everything is in files
of the NATS server, so that it survives restarts of all processes; old entries expire.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import nats.js.errors
from nats.js.api import ObjectMeta

from motet_gateway.http.problems import NotFound
from motet_gateway.storage.jetstream import (
    ERRORS,
    TIMEOUT,
    expiry,
    key_value,
    object_store,
    read_object,
    unavailable,
)
from motet_gateway.storage.quota import Entry, Stored
from motet_gateway.storage.work_queue import WorkQueue
from motet_shared.wire import subjects

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js.kv import KeyValue
    from nats.js.object_store import ObjectStore

_QUEUE, _RECORDS, _IMAGES = "motet_jobs", "motet_job_records", "motet_pictures"
_COMPANION_KEYS = ("seq.", "stop.")  # prefixes of keys that accompany a job's record


def owner_of(job: str) -> str:
    """Return the tenant of a job, given the job's id.

    The id is "of.TENANT.ID", or "ID" for a tenant without a name, which is returned as "".
    """
    parts = job.split(".")
    return parts[1] if len(parts) == 3 and parts[0] == "of" else ""


class ImageStore:
    """Hold the job queue (`queue`), the record of each job (`records`), and images by name."""

    def __init__(
        self,
        queue: WorkQueue,
        records: KeyValue,
        pictures: ObjectStore,
        ttls: tuple[float, float],
        stored: Stored,
    ):
        self._picture_ttl, self._job_ttl = ttls
        self.queue, self.records, self._images = queue, records, pictures
        self.stored = stored
        stored.sources.append(self._entries)

    @classmethod
    async def open(
        cls,
        client: Client,
        stored: Stored,
        picture_ttl: float,
        job_ttl: float,
        job_patience: float,
    ) -> ImageStore:
        """Create or reuse the queue and buckets; what exists is used with its settings.

        Its bytes are counted in `stored`. Times are in seconds.
        """
        js = client.jetstream(timeout=TIMEOUT)
        queue = await WorkQueue.open(
            client,
            _QUEUE,
            subjects.jobs("draw"),
            consumer="draw",
            ttl=job_ttl,
            patience=job_patience,
        )
        records = await key_value(js, _RECORDS, job_ttl)
        images = await object_store(js, _IMAGES, picture_ttl)
        return cls(queue, records, images, (picture_ttl, job_ttl), stored)

    # ------------------------------------------------------------------------------------------------------- pictures
    async def put_image(self, data: bytes, kind: str, owner: str = "") -> str:
        """Store an image of the tenant `owner`; return its unguessable name.

        `kind` is png, jpeg or webp. Raises QuotaExceeded if the tenant stores too much, Unavailable
        if the store does not answer.
        """
        name = f"{secrets.token_urlsafe(24)}.{kind}"
        await self.stored.check(owner, len(data), "response_format")
        try:
            with self.stored.putting(
                Entry(name, owner, len(data), time.time() + self._picture_ttl)
            ):
                await self._images.put(name, data, ObjectMeta(description=owner))
        except ERRORS as error:
            raise unavailable("the image cannot be stored", error) from None
        return name

    async def image(self, name: str) -> bytes:
        """Return the data of an image.

        Raises NotFound if it does not exist or has expired, Unavailable if the store does not
        answer.
        """
        try:
            return await read_object(self._images, name)
        except (nats.js.errors.NotFoundError, nats.js.errors.InvalidObjectNameError):
            raise NotFound(f"image {name[:60]!r} does not exist; it may have expired") from None
        except ERRORS as error:
            raise unavailable("the image cannot be read", error) from None

    # ---------------------------------------------------------------------------------------------------------- quotas
    async def create_record(self, job: str, data: bytes) -> None:
        """Store the record of a new job.

        Raises KeyWrongLastSequenceError if there is one, QuotaExceeded if the tenant stores too
        much.
        """
        # At least one byte is for its images.
        await self.stored.check(owner_of(job), len(data) + 1, "prompt")
        with self.stored.putting(Entry(job, owner_of(job), len(data), time.time() + self._job_ttl)):
            await self.records.create(job, data)

    async def _entries(self) -> AsyncIterator[Entry]:
        """Yield all images and job records in the store."""
        now = time.time()
        try:
            pictures = await self._images.list(ignore_deletes=True)
        except nats.js.errors.NotFoundError:
            pictures = []
        for info in pictures:
            if not info.deleted:
                yield Entry(
                    info.name,
                    info.description or "",
                    info.size or 0,
                    expiry(info.mtime, self._picture_ttl),
                )
        watcher = await self.records.watchall(ignore_deletes=True)
        try:
            async for record in watcher:
                if record is None:  # end of the existing records
                    break
                if record.key is not None and not record.key.startswith(_COMPANION_KEYS):
                    yield Entry(
                        record.key,
                        owner_of(record.key),
                        len(record.value or b""),
                        now + self._job_ttl,
                    )
        finally:
            await watcher.stop()
