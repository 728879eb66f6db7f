"""What outlives the processes: pictures for a while, and jobs until they are done, in the JetStream of NATS.

It is there where the server was started with JetStream (`motet up --store FOLDER`). Everything lies in files of the
server, so that it survives restarts of all processes; what is old goes by itself.
"""

from __future__ import annotations

import logging
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
import nats.errors
import nats.js.errors
from msgspec import Struct
from nats.js.api import ConsumerConfig, KeyValueConfig, ObjectStoreConfig, RetentionPolicy, StorageType, StreamConfig

from motet_shared import subjects
from motet_shared.bus import Bus
from motet_shared.errors import Unavailable
from motet_shared.transport import NatsTransport

from .problems import NotFound

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js import JetStreamContext
    from nats.js.kv import KeyValue
    from nats.js.object_store import ObjectStore

log = logging.getLogger(__name__)

_QUEUE, _NOTES, _PICTURES = "motet_jobs", "motet_job_notes", "motet_pictures"
_CONSUMER = "draw"
_TIMEOUT = 5.0  # seconds for an answer of JetStream
ERRORS = (nats.errors.Error, nats.js.errors.Error, TimeoutError)


class _State(Struct):
    """Of a stream. `deleted`: numbers that are gone, of those after `first_seq`."""

    first_seq: int
    deleted: list[int] = []


class _Info(Struct):
    state: _State


class Keep:
    """The queue of jobs (`queue`), what is known of each (`notes`), and pictures by name."""

    def __init__(self, client: Client, notes: KeyValue, pictures: ObjectStore, patience: float):
        self._client, self._js = client, client.jetstream(timeout=_TIMEOUT)
        self.notes, self._pictures = notes, pictures
        self.patience = patience  # seconds without a sign of life after which a job goes to another gateway

    @classmethod
    async def open(cls, bus: Bus, picture_ttl: float, job_ttl: float, job_patience: float) -> Keep | None:
        """None where the server has no JetStream. What exists is used as it is."""
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
        with suppress(nats.js.errors.BadRequestError):  # it is there, with other settings
            await js.add_stream(queue)
        notes = KeyValueConfig(bucket=_NOTES, ttl=job_ttl, storage=StorageType.FILE)
        pictures = ObjectStoreConfig(bucket=_PICTURES, ttl=picture_ttl, storage=StorageType.FILE)
        with suppress(nats.js.errors.BadRequestError):
            await js.create_key_value(notes)
        with suppress(nats.js.errors.BadRequestError):
            await js.create_object_store(config=pictures, bucket=_PICTURES)
        return cls(client, await js.key_value(_NOTES), await js.object_store(_PICTURES), job_patience)

    # ------------------------------------------------------------------------------------------------------- pictures
    async def put_picture(self, data: bytes, kind: str) -> str:
        """Its name: whoever knows it may have it, and nobody can guess it. `kind`: png, jpeg or webp."""
        name = f"{secrets.token_urlsafe(24)}.{kind}"
        try:
            await self._pictures.put(name, data)
        except ERRORS as error:
            raise Unavailable(f"the picture cannot be kept: {error or type(error).__name__}; try again") from None
        return name

    async def picture(self, name: str) -> bytes:
        """NotFound for one that was never there, or is too old."""
        try:
            found = await self._pictures.get(name)
        except (nats.js.errors.NotFoundError, nats.js.errors.InvalidObjectNameError):
            raise NotFound(f"picture {name[:60]!r} is not here; it may have expired") from None
        except ERRORS as error:
            raise Unavailable(f"the picture cannot be read: {error or type(error).__name__}; try again") from None
        return found.data or b""

    # ----------------------------------------------------------------------------------------------------------- jobs
    async def enqueue(self, job: str) -> int:
        """Put a job at the end of the queue; the same one for the second time stays where it is. Its number there."""
        ack = await self._js.publish(subjects.jobs("draw"), job.encode(), headers={"Nats-Msg-Id": job})
        return ack.seq

    async def position(self, seq: int) -> int:
        """How many are before that one in the queue; those that were withdrawn do not count."""
        reply = await self._client.request(f"$JS.API.STREAM.INFO.{_QUEUE}", b'{"deleted_details":true}', _TIMEOUT)
        state = msgspec.json.decode(reply.data, type=_Info).state
        first = max(await self._delivered() + 1, state.first_seq)
        return max(seq - first - sum(first <= gone < seq for gone in state.deleted), 0)

    async def withdraw(self, seq: int) -> None:
        """Take a job out of the queue, if it is still there."""
        with suppress(nats.js.errors.APIError):
            await self._js.delete_msg(_QUEUE, seq)

    async def _delivered(self) -> int:
        """The number of the last job that somebody has taken; 0 before the first."""
        try:
            info = await self._js.consumer_info(_QUEUE, _CONSUMER)
        except nats.js.errors.NotFoundError:
            return 0
        return (info.delivered.stream_seq if info.delivered is not None else 0) or 0

    async def queue(self) -> JetStreamContext.PullSubscription:
        """From which jobs are fetched, each by one gateway."""
        config = ConsumerConfig(durable_name=_CONSUMER, ack_wait=self.patience, max_deliver=-1)
        queue = await self._js.pull_subscribe(subjects.jobs("draw"), durable=_CONSUMER, stream=_QUEUE, config=config)
        self.patience = (await queue.consumer_info()).config.ack_wait or self.patience  # that of whoever came first
        return queue
