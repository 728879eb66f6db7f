"""Give each job of a durable queue to one gateway, and to another one if that gateway dies."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING

import msgspec
import nats.js.errors
from msgspec import Struct
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig, RetentionPolicy, StorageType, StreamConfig

from motet_shared.errors import MotetError

from .jetstream import ERRORS, TIMEOUT, create

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js import JetStreamContext

log = logging.getLogger(__name__)

_RETRY_DELAY = 2.0  # seconds before the next attempt
_FETCH = 5.0  # seconds to wait for a job
_ELSEWHERE_PAUSE = 1.0  # seconds without a fetch after a job that must run elsewhere
_COUNTED = 1024  # jobs whose attempts here are counted; the oldest are forgotten

Run = Callable[[str, int], Awaitable[bool]]


class Place(Enum):
    """Where a job may run: at any gateway, at this one and some others, or only at others."""

    ANYWHERE = 0
    HERE = 1
    ELSEWHERE = 2


def _anywhere(job: str) -> Place:
    return Place.ANYWHERE


class _State(Struct):
    """Decode the state of a stream; `deleted` holds the missing sequence numbers after `first_seq`."""

    first_seq: int
    deleted: list[int] = []


class _Info(Struct):
    state: _State


class WorkQueue:
    """Queue jobs by name, on disk.

    `patience`: seconds without a sign of life of the gateway that runs a job, after which the job is
    given to another one.
    """

    def __init__(self, client: Client, stream: str, subject: str, consumer: str, patience: float):
        self._client, self._js = client, client.jetstream(timeout=TIMEOUT)
        self._stream, self._subject, self._consumer = stream, subject, consumer
        self.patience = patience
        self._attempts: OrderedDict[str, int] = OrderedDict()

    @classmethod
    async def open(
        cls,
        client: Client,
        stream: str,
        subject: str,
        *,
        consumer: str,
        ttl: float,
        patience: float,
    ) -> WorkQueue:
        """Create or reuse the queue; an existing one keeps its settings. `ttl` is in seconds."""
        config = StreamConfig(
            name=stream,
            subjects=[subject],
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType.FILE,
            max_age=ttl,
        )
        queue = cls(client, stream, subject, consumer, patience)
        await create(lambda replicas: queue._js.add_stream(config, num_replicas=replicas))
        return queue

    async def push(self, job: str) -> int:
        """Append a job; return its sequence number.

        Repeating it within JetStream's window of deduplication does not move the job.
        """
        ack = await self._js.publish(self._subject, job.encode(), headers={"Nats-Msg-Id": job})
        return ack.seq

    async def position(self, seq: int) -> int:
        """Return how many jobs precede `seq` in the queue; withdrawn ones do not count."""
        reply = await self._client.request(
            f"$JS.API.STREAM.INFO.{self._stream}", b'{"deleted_details":true}', TIMEOUT
        )
        state = msgspec.json.decode(reply.data, type=_Info).state
        first = max(await self._delivered() + 1, state.first_seq)
        return max(seq - first - sum(first <= gone < seq for gone in state.deleted), 0)

    async def withdraw(self, seq: int) -> None:
        """Remove a job from the queue, if it is still there."""
        with suppress(nats.js.errors.APIError):
            await self._js.delete_msg(self._stream, seq)

    async def _delivered(self) -> int:
        """Return the sequence number of the last delivered job; 0 before the first."""
        try:
            info = await self._js.consumer_info(self._stream, self._consumer)
        except nats.js.errors.NotFoundError:
            return 0
        return (info.delivered.stream_seq if info.delivered is not None else 0) or 0

    # ------------------------------------------------------------------------------------- running
    async def work(self, run: Run, place: Callable[[str], Place] = _anywhere) -> None:
        """Run one job after another, until cancelled.

        `run` takes the job's name and how many times it was delivered, and returns True once the
        job is over; with False it is delivered again after a moment. It is cancelled with this
        task, and its job goes back to the queue. `place` says where a job may run; one that may not
        run at every gateway is counted by the times that it ran at this one.
        """
        queue = None
        while True:
            try:
                queue = queue or await self._subscribe()
                for message in await queue.fetch(1, timeout=_FETCH):
                    await self._run_at(message, run, place(message.data.decode()))
            except ERRORS as error:  # the queue is empty, or NATS is unreachable
                if not isinstance(error, TimeoutError):
                    log.warning("%s: %s", self._stream, error or type(error).__name__)
                    queue = None
                    await asyncio.sleep(_RETRY_DELAY)

    async def _subscribe(self) -> JetStreamContext.PullSubscription:
        config = ConsumerConfig(durable_name=self._consumer, ack_wait=self.patience, max_deliver=-1)
        queue = await self._js.pull_subscribe(
            self._subject, durable=self._consumer, stream=self._stream, config=config
        )
        # The setting of the gateway that created the consumer is the one that counts.
        self.patience = (await queue.consumer_info()).config.ack_wait or self.patience
        return queue

    async def _run_at(self, message: Msg, run: Run, place: Place) -> None:
        attempt = message.metadata.num_delivered
        if place is Place.ELSEWHERE:
            await message.nak()
            await asyncio.sleep(_ELSEWHERE_PAUSE)
            return
        if place is Place.HERE:  # deliveries to gateways elsewhere were no attempts
            attempt = self._count(message.data.decode())
        await self._run(message, run, attempt)

    def _count(self, job: str) -> int:
        """Count an attempt of a job at this gateway; return how many there were."""
        self._attempts[job] = self._attempts.pop(job, 0) + 1
        if len(self._attempts) > _COUNTED:
            self._attempts.popitem(last=False)
        return self._attempts[job]

    async def _run(self, message: Msg, run: Run, attempt: int) -> None:
        alive = asyncio.create_task(self._report(message))
        try:
            over = await self._is_over(run, message.data.decode(), attempt)
            await (message.ack() if over else message.nak(delay=_RETRY_DELAY))
        except asyncio.CancelledError:
            with suppress(*ERRORS):
                await message.nak()
            raise
        finally:
            alive.cancel()

    async def _is_over(self, run: Run, job: str, attempt: int) -> bool:
        """Run a job; one that raises is delivered again, and ends no other's work."""
        try:
            return await run(job, attempt)
        except Exception as error:
            if isinstance(error, MotetError) and error.retryable:
                log.warning("%s: job %s: %s", self._stream, job, error.message)
            else:
                log.exception("%s: job %s failed", self._stream, job)
            return False

    async def _report(self, message: Msg) -> None:
        while True:
            await asyncio.sleep(self.patience / 3)
            await message.in_progress()
