"""Run image generation as durable jobs, which survive restarts of all processes.

A job is a record (JobNote) and an entry of a work queue. A gateway takes an entry, generates the
images and acknowledges it; in the meantime it reports progress to the queue. If the gateway dies,
the job is delivered to another gateway, or to the same one after its restart. The seed is fixed at
submission, so a second attempt generates the same images. Cancellation writes a mark beside the
record, for which the generating gateway polls: the record of a running job is written only by the
gateway that runs it, the mark only by the one that cancels it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, Literal

import msgspec
import nats.js.errors
from msgspec import Struct

from motet_gateway.http.problems import NotFound, Problem
from motet_gateway.openai.aliases import model_of
from motet_gateway.openai.requests import random_seed
from motet_gateway.storage.jetstream import ERRORS, unavailable
from motet_gateway.tenancy.tenant_sites import TenantSites
from motet_pipelines.images.draw import ROLE, Drawn, draw
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import (
    BadRequest,
    MotetError,
    Unavailable,
    UnknownModel,
    UnsupportedParameter,
    as_motet_error,
)
from motet_shared.messages import Draw
from motet_shared.wire.bus import Bus

from .schema import GenerationBody, check, requests
from .store import ImageStore, owner_of

log = logging.getLogger(__name__)

_AWAY = (Unavailable, UnknownModel)  # a model that was there when the job was submitted
_MAX_ATTEMPTS = 5  # attempts after which a job has failed
_PROGRESS_INTERVAL = 0.5  # seconds between two progress updates of a record
# Seconds between two polls for the mark of a running job: a watch would not survive a restart of
# NATS.
_POLL_INTERVAL = 0.1


class JobRecord(Struct, kw_only=True, omit_defaults=True):
    """Hold the state of a job, as it is stored."""

    id: str
    body: GenerationBody
    created: int  # Unix seconds
    status: Literal["queued", "running", "done", "failed", "cancelled"] = "queued"
    seq: int = 0  # its sequence number in the queue
    step: int = 0  # summed over all its images, like `steps`
    steps: int = 0
    pictures: list[str] = []  # names in the store
    error: dict[str, str | None] | None = None


OVER = ("done", "failed", "cancelled")
_decode = msgspec.json.Decoder(JobRecord).decode


class ImageJobs:
    """Accept jobs, and run `parallel` of them at a time."""

    def __init__(
        self,
        bus: Bus,
        store: ImageStore,
        uploads: Callable[[], Coroutine[Any, Any, BlobStore]],
        deadline: float,
        sites: TenantSites,
    ):
        self._bus, self._store, self._uploads, self._deadline = bus, store, uploads, deadline
        self._sites = sites
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, parallel: int) -> None:
        self._tasks = [
            asyncio.create_task(
                self._store.queue.work(self._run, lambda job: self._sites.place(owner_of(job))),
                name=f"image-jobs-{n}",
            )
            for n in range(parallel)
        ]

    async def close(self) -> None:
        """Stop; jobs that are running are returned to the queue."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------------- taking in
    async def submit(self, job: str, body: GenerationBody) -> tuple[JobRecord, bool]:
        """Store and enqueue a job; return its record, and whether it is new.

        A repeated submission with the same id and body returns the existing record. Raises BadRequest
        if the id has another body, Unavailable if the store does not answer.
        """
        check(body, kept=True)
        if body.stream:
            raise BadRequest(
                "`stream` is not supported for jobs; poll GET /v1/images/jobs/ID", param="stream"
            )
        for field in ("controlnets", "ip_adapters"):
            if getattr(body, field):
                message = f"`{field}` is not supported for jobs, which keep no further images; draw at once"
                raise UnsupportedParameter(message, param=field)
        wanted = body
        if body.seed is None:
            body = msgspec.structs.replace(body, seed=random_seed())
        record, is_new = JobRecord(id=job, body=body, created=int(time.time())), True
        try:
            try:
                if await self.has(job):
                    raise nats.js.errors.KeyWrongLastSequenceError
                with suppress(Unavailable):  # the model may come
                    model_of(self._bus.directory, ROLE, body.model)
                await self._store.create_record(job, msgspec.json.encode(record))
            except nats.js.errors.KeyWrongLastSequenceError:
                record, is_new = await self._known(job), False
                _check_same(record, wanted)
            if record.status == "queued" and not await self._is_queued(job):
                await self._store.records.put(
                    f"seq.{job}", b"%d" % await self._store.queue.push(job)
                )
        except ERRORS as error:
            raise unavailable("the job cannot be stored", error) from None
        return record, is_new

    async def has(self, job: str) -> bool:
        """Return True if the job was submitted before.

        Raises Unavailable if the store does not answer.
        """
        try:
            await self._store.records.get(job)
        except nats.js.errors.NotFoundError:
            return False
        except ERRORS as error:
            raise unavailable("the job cannot be stored", error) from None
        return True

    async def status(self, job: str) -> tuple[JobRecord, int | None]:
        """Return the record, and the number of jobs before this one while it is queued, else None.

        Raises NotFound for an unknown or expired job, Unavailable if the store does not answer.
        """
        try:
            record = await self._known(job)
            if record.status != "queued":
                return record, None
            return record, await self._store.queue.position(await self._seq(job))
        except nats.js.errors.NotFoundError:
            raise NotFound(
                f"job {public_id(job)[:60]!r} does not exist; it may have expired"
            ) from None
        except ERRORS as error:
            raise unavailable("the job cannot be read", error) from None

    async def cancel(self, job: str) -> JobRecord:
        """Cancel a job and return its record; idempotent, and without effect on a finished job.

        Raises NotFound and Unavailable like `status`.
        """
        try:
            record = await self._known(job)
            if record.status in OVER:
                return record
            await self._store.records.put(_cancel_key(job), b"")
            if record.status == "queued":
                with suppress(nats.js.errors.NotFoundError):  # it is not enqueued yet
                    await self._store.queue.withdraw(await self._seq(job))
                record.status = "cancelled"
                await self._save(record)
            return await self._known(job)
        except nats.js.errors.NotFoundError:
            raise NotFound(
                f"job {public_id(job)[:60]!r} does not exist; it may have expired"
            ) from None
        except ERRORS as error:
            raise unavailable("the job cannot be cancelled", error) from None

    async def _known(self, job: str) -> JobRecord:
        record = _decode((await self._store.records.get(job)).value or b"")
        if record.status not in OVER and await self._is_cancelled(job):
            record.status = "cancelled"
        return record

    async def _seq(self, job: str) -> int:
        return int((await self._store.records.get(f"seq.{job}")).value or b"0")

    async def _is_queued(self, job: str) -> bool:
        try:
            return await self._seq(job) > 0
        except nats.js.errors.NotFoundError:
            return False

    async def _is_cancelled(self, job: str) -> bool:
        try:
            await self._store.records.get(_cancel_key(job))
        except nats.js.errors.NotFoundError:
            return False
        return True

    # --------------------------------------------------------------------------------------------------------- drawing
    async def _run(self, job: str, attempt: int) -> bool:
        """Run one job; return True once it is over, False to try it again."""
        try:
            record = await self._known(job)
        except nats.js.errors.NotFoundError:
            return True
        if record.status in OVER:  # cancelled, or its acknowledgement was lost
            await self._save(record)
            return True
        try:
            with self._sites.limited(owner_of(job)):
                await self._draw_unless_cancelled(record)
        except ERRORS:
            raise
        except Exception as error:
            return await self._failed(record, attempt, as_motet_error(error))
        return True

    async def _failed(self, record: JobRecord, attempt: int, error: MotetError) -> bool:
        """Record why an attempt failed; return False if another one may succeed."""
        is_away = isinstance(error, _AWAY) and time.time() < record.created + self._deadline
        if is_away or (error.retryable and attempt < _MAX_ATTEMPTS):
            log.warning("job %s: %s; it is tried again", record.id, error.message)
            return False
        record.status, record.error = "failed", Problem.of(error).as_dict()
        await self._save(record)
        return True

    async def _draw_unless_cancelled(self, record: JobRecord) -> None:
        """Generate the images, and stop if the job is cancelled."""
        drawing = asyncio.create_task(self._draw(record), name=f"job-{record.id}")
        try:
            while not drawing.done():
                await asyncio.wait((drawing,), timeout=_POLL_INTERVAL)
                if not drawing.done() and await self._is_cancelled(record.id):
                    record.status = "cancelled"
                    break
        finally:
            drawing.cancel()
            await asyncio.wait((drawing,))
        if record.status == "cancelled":
            await self._save(record)
        else:
            drawing.result()

    async def _draw(self, record: JobRecord) -> None:
        """Generate all images of a job, one after another."""
        model = model_of(self._bus.directory, ROLE, record.body.model)
        asked = requests(record.body, model, record.id)
        record.status, record.pictures = "running", []
        for number, request in enumerate(asked):
            drawn = await self._generate(record, request, number, len(asked))
            record.pictures.append(
                await self._store.put_image(drawn.data, request.format, owner_of(record.id))
            )
        record.status = "done"
        await self._save(record)

    async def _generate(self, record: JobRecord, request: Draw, number: int, count: int) -> Drawn:
        drawn, noted_at = Drawn(), 0.0
        strokes = draw(self._bus, await self._uploads(), request, drawn, deadline=self._deadline)
        async with aclosing(strokes):
            async for stroke in strokes:
                record.step, record.steps = (
                    number * stroke.steps + stroke.step,
                    count * stroke.steps,
                )
                if time.monotonic() - noted_at > _PROGRESS_INTERVAL:
                    noted_at = time.monotonic()
                    await self._save(record)
        return drawn

    async def _save(self, record: JobRecord) -> None:
        await self._store.records.put(record.id, msgspec.json.encode(record))


def public_id(job: str) -> str:
    """Return the id that the client uses, which is unique per owner only."""
    return job.rpartition(".")[2]


def _cancel_key(job: str) -> str:
    """Return the key of the mark that a job is cancelled."""
    return f"stop.{job}"


def _check_same(record: JobRecord, wanted: GenerationBody) -> None:
    known = (
        record.body if wanted.seed is not None else msgspec.structs.replace(record.body, seed=None)
    )
    if known != wanted:
        raise BadRequest(
            f"`id` {public_id(record.id)!r} belongs to a job with another body; choose a new one",
            param="id",
        )
