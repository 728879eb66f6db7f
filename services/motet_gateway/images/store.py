"""Store images until they expire, and jobs until they are done, in NATS JetStream.

It is available if the NATS server has JetStream (`motet up --store FOLDER`). Everything is in files
of the NATS server, so that it survives restarts of all processes; old entries expire.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec
import nats.errors
import nats.js.errors
from msgspec import Struct
from nats.js.api import (
    ConsumerConfig,
    KeyValueConfig,
    ObjectMeta,
    ObjectStoreConfig,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)

from motet_gateway.http.problems import NotFound
from motet_shared.errors import Unavailable
from motet_shared.wire import subjects
from motet_shared.wire.bus import Bus
from motet_shared.wire.transport import NatsTransport

from .store_quota import Entry, Stored

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js import JetStreamContext
    from nats.js.kv import KeyValue
    from nats.js.object_store import ObjectStore

log = logging.getLogger(__name__)

_QUEUE, _RECORDS, _IMAGES = "motet_jobs", "motet_job_records", "motet_pictures"
_CONSUMER = "draw"
_TIMEOUT = 12.0  # seconds for an answer of JetStream, long enough for a pause of NATS
ERRORS = (nats.errors.Error, nats.js.errors.Error, TimeoutError)


_COMPANION_KEYS = ("seq.", "stop.")  # prefixes of keys that accompany a job's record


def owner_of(job: str) -> str:
    """Return the tenant of a job, given the job's id.

    The id is "of.TENANT.ID", or "ID" for a tenant without a name, which is returned as "".
    """
    parts = job.split(".")
    return parts[1] if len(parts) == 3 and parts[0] == "of" else ""


def _until(mtime: str | None, ttl: float) -> float:
    """Return the Unix time in seconds at which an entry put at `mtime` (ISO 8601) expires."""
    try:
        return datetime.fromisoformat(mtime or "").timestamp() + ttl
    except ValueError:
        return time.time() + ttl


class _State(Struct):
    """State of a stream; `deleted` holds the missing sequence numbers after `first_seq`."""

    first_seq: int
    deleted: list[int] = []


class _Info(Struct):
    state: _State


class JetStreamStore:
    """Hold the job queue (`queue`), the record of each job (`records`), and images by name."""

    def __init__(
        self,
        client: Client,
        records: KeyValue,
        pictures: ObjectStore,
        patience: float,
        ttls: tuple[float, float],
        limit_of: Callable[[str], int | None],
    ):
        self._client, self._js = client, client.jetstream(timeout=_TIMEOUT)
        self._picture_ttl, self._job_ttl = ttls
        self.stored = Stored(self._entries, limit_of)
        self.records, self._images = records, pictures
        self.patience = patience  # seconds without a progress report until a job is redelivered

    @classmethod
    async def open(
        cls,
        bus: Bus,
        picture_ttl: float,
        job_ttl: float,
        job_patience: float,
        limit_of: Callable[[str], int | None] = lambda owner: None,
    ) -> JetStreamStore | None:
        """Create or reuse the queue and buckets; return None if the server has no JetStream.

        What exists is used with its settings. `limit_of` returns the most bytes that a tenant may
        store, given its name; None: no limit. Times are in seconds.
        """
        if not isinstance(bus.frames, NatsTransport):
            return None
        client = bus.frames.client
        js = client.jetstream(timeout=_TIMEOUT)
        try:
            await js.account_info()
        except ERRORS:
            return None
        queue = StreamConfig(
            name=_QUEUE,
            subjects=[subjects.jobs("draw")],
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType.FILE,
            max_age=job_ttl,
        )
        with suppress(nats.js.errors.BadRequestError):  # it exists with other settings
            await js.add_stream(queue)
        records = KeyValueConfig(bucket=_RECORDS, ttl=job_ttl, storage=StorageType.FILE)
        pictures = ObjectStoreConfig(bucket=_IMAGES, ttl=picture_ttl, storage=StorageType.FILE)
        with suppress(nats.js.errors.BadRequestError):
            await js.create_key_value(records)
        with suppress(nats.js.errors.BadRequestError):
            await js.create_object_store(config=pictures, bucket=_IMAGES)
        stores = await js.key_value(_RECORDS), await js.object_store(_IMAGES)
        return cls(client, *stores, job_patience, (picture_ttl, job_ttl), limit_of)

    # ------------------------------------------------------------------------------------------------------- pictures
    async def put_image(self, data: bytes, kind: str, owner: str = "") -> str:
        """Store an image of the tenant `owner`; return its unguessable name.

        `kind` is png, jpeg or webp. Raises QuotaExceeded if the tenant stores too much, Unavailable
        if the store does not answer.
        """
        name = f"{secrets.token_urlsafe(24)}.{kind}"
        await self.check_room(owner, len(data), "response_format")
        try:
            with self.stored.putting(
                Entry(name, owner, len(data), time.time() + self._picture_ttl)
            ):
                await self._images.put(name, data, ObjectMeta(description=owner))
        except ERRORS as error:
            raise Unavailable(
                f"the image cannot be stored: {error or type(error).__name__}; try again"
            ) from None
        return name

    async def image(self, name: str) -> bytes:
        """Return the data of an image.

        Raises NotFound if it does not exist or has expired, Unavailable if the store does not
        answer.
        """
        try:
            found = await self._images.get(name)
        except (nats.js.errors.NotFoundError, nats.js.errors.InvalidObjectNameError):
            raise NotFound(f"image {name[:60]!r} does not exist; it may have expired") from None
        except ERRORS as error:
            raise Unavailable(
                f"the image cannot be read: {error or type(error).__name__}; try again"
            ) from None
        return found.data or b""

    # ---------------------------------------------------------------------------------------------------------- quotas
    async def check_room(self, owner: str, size: int, param: str | None = None) -> None:
        """Raise QuotaExceeded unless the tenant may store `size` more bytes.

        Raises Unavailable if the store does not answer.
        """
        try:
            await self.stored.check(owner, size, param)
        except ERRORS as error:
            raise Unavailable(
                f"the stored images cannot be listed: {error or type(error).__name__}; try again"
            ) from None

    async def create_record(self, job: str, data: bytes) -> None:
        """Store the record of a new job.

        Raises KeyWrongLastSequenceError if there is one, QuotaExceeded if the tenant stores too
        much.
        """
        await self.check_room(
            owner_of(job), len(data) + 1, "prompt"
        )  # and at least one byte for its images
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
                    _until(info.mtime, self._picture_ttl),
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

    # ----------------------------------------------------------------------------------------------------------- jobs
    async def enqueue(self, job: str) -> int:
        """Append a job to the queue; return its sequence number.

        Repeating it within JetStream's window of deduplication does not move the job.
        """
        ack = await self._js.publish(
            subjects.jobs("draw"), job.encode(), headers={"Nats-Msg-Id": job}
        )
        return ack.seq

    async def position(self, seq: int) -> int:
        """Return how many jobs precede `seq` in the queue; withdrawn ones do not count."""
        reply = await self._client.request(
            f"$JS.API.STREAM.INFO.{_QUEUE}", b'{"deleted_details":true}', _TIMEOUT
        )
        state = msgspec.json.decode(reply.data, type=_Info).state
        first = max(await self._delivered() + 1, state.first_seq)
        return max(seq - first - sum(first <= gone < seq for gone in state.deleted), 0)

    async def withdraw(self, seq: int) -> None:
        """Remove a job from the queue, if it is still there."""
        with suppress(nats.js.errors.APIError):
            await self._js.delete_msg(_QUEUE, seq)

    async def _delivered(self) -> int:
        """Return the sequence number of the last delivered job; 0 before the first."""
        try:
            info = await self._js.consumer_info(_QUEUE, _CONSUMER)
        except nats.js.errors.NotFoundError:
            return 0
        return (info.delivered.stream_seq if info.delivered is not None else 0) or 0

    async def queue(self) -> JetStreamContext.PullSubscription:
        """Subscribe to the queue; each job is delivered to one gateway."""
        config = ConsumerConfig(durable_name=_CONSUMER, ack_wait=self.patience, max_deliver=-1)
        queue = await self._js.pull_subscribe(
            subjects.jobs("draw"), durable=_CONSUMER, stream=_QUEUE, config=config
        )
        self.patience = (
            await queue.consumer_info()
        ).config.ack_wait or self.patience  # the setting of the gateway that created the consumer
        return queue
