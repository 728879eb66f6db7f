"""Run image generation as durable jobs, which survive restarts of all processes.

A job is a note (JobNote) and an entry of a work queue. A gateway takes an entry, generates the
images and acknowledges it; in the meantime it reports progress to the queue. If the gateway dies,
the job is delivered to another gateway, or to the same one after its restart. The seed is fixed at
submission, so a second attempt generates the same images. Cancellation writes a mark beside the
note, for which the generating gateway polls: the note of a running job is written only by the
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
from nats.aio.msg import Msg

from motet_gateway.http.problems import NotFound, Problem
from motet_gateway.openai.aliases import model_of
from motet_gateway.openai.requests import fresh_seed
from motet_pipelines.images.draw import ROLE, Drawn, draw
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import BadRequest, MotetError, Unavailable, as_motet_error
from motet_shared.messages import Draw
from motet_shared.wire.bus import Bus

from .schema import GenerationBody, check, requests
from .store import ERRORS, JetStreamStore, owner_of

log = logging.getLogger(__name__)

_TRIES = 5  # attempts after which a job has failed
_PAUSE = 2.0  # seconds before the next attempt
_NOTE_EVERY = 0.5  # seconds between two progress updates of a note
_FETCH = 5.0  # seconds to wait for a job
# Seconds between two polls for the mark of a running job: a watch would not survive a restart of
# NATS.
_LOOK_EVERY = 0.1


class JobNote(Struct, kw_only=True, omit_defaults=True):
    """State of a job, as it is stored."""

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
_decode = msgspec.json.Decoder(JobNote).decode


class ImageJobs:
    """Accept jobs, and run `parallel` of them at a time."""

    def __init__(
        self,
        bus: Bus,
        keep: JetStreamStore,
        uploads: Callable[[], Coroutine[Any, Any, BlobStore]],
        deadline: float,
    ):
        self._bus, self._keep, self._uploads, self._deadline = bus, keep, uploads, deadline
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, parallel: int) -> None:
        self._tasks = [
            asyncio.create_task(self._work(), name=f"image-jobs-{n}") for n in range(parallel)
        ]

    async def close(self) -> None:
        """Stop; jobs that are running are returned to the queue."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------------- taking in
    async def submit(self, job: str, body: GenerationBody) -> tuple[JobNote, bool]:
        """Store and enqueue a job; return its note, and whether it is new.

        A repeated submission with the same id and body returns the existing note. Raises BadRequest
        if the id has another body, Unavailable if the store does not answer.
        """
        check(body, kept=True)
        if body.stream:
            raise BadRequest("`stream`: a job has no stream; ask for it with GET", param="stream")
        wanted = body
        if body.seed is None:
            body = msgspec.structs.replace(body, seed=fresh_seed())
        note, fresh = JobNote(id=job, body=body, created=int(time.time())), True
        try:
            try:
                if await self.has(job):
                    raise nats.js.errors.KeyWrongLastSequenceError
                await self._keep.create_note(job, msgspec.json.encode(note))
            except nats.js.errors.KeyWrongLastSequenceError:
                note, fresh = await self._known(job), False
                _check_same(note, wanted)
            if note.status == "queued":
                await self._keep.notes.put(f"seq.{job}", b"%d" % await self._keep.enqueue(job))
        except ERRORS as error:
            raise Unavailable(
                f"the job cannot be kept: {error or type(error).__name__}; send it again"
            ) from None
        return note, fresh

    async def has(self, job: str) -> bool:
        """Return True if the job was submitted before.

        Raises Unavailable if the store does not answer.
        """
        try:
            await self._keep.notes.get(job)
        except nats.js.errors.NotFoundError:
            return False
        except ERRORS as error:
            raise Unavailable(
                f"the job cannot be kept: {error or type(error).__name__}; send it again"
            ) from None
        return True

    async def status(self, job: str) -> tuple[JobNote, int | None]:
        """Return the note, and the number of jobs before this one while it is queued, else None.

        Raises NotFound for an unknown or expired job, Unavailable if the store does not answer.
        """
        try:
            note = await self._known(job)
            if note.status != "queued":
                return note, None
            return note, await self._keep.position(await self._seq(job))
        except nats.js.errors.NotFoundError:
            raise NotFound(
                f"job {public_id(job)[:60]!r} is not here; it may have expired"
            ) from None
        except ERRORS as error:
            raise Unavailable(
                f"the job cannot be read: {error or type(error).__name__}; try again"
            ) from None

    async def cancel(self, job: str) -> JobNote:
        """Cancel a job and return its note; idempotent, and without effect on a finished job.

        Raises NotFound and Unavailable like `status`.
        """
        try:
            note = await self._known(job)
            if note.status in OVER:
                return note
            await self._keep.notes.put(_mark(job), b"")
            if note.status == "queued":
                with suppress(nats.js.errors.NotFoundError):  # it is not enqueued yet
                    await self._keep.withdraw(await self._seq(job))
                note.status = "cancelled"
                await self._note(note)
            return await self._known(job)
        except nats.js.errors.NotFoundError:
            raise NotFound(
                f"job {public_id(job)[:60]!r} is not here; it may have expired"
            ) from None
        except ERRORS as error:
            raise Unavailable(
                f"the job cannot be cancelled: {error or type(error).__name__}; try again"
            ) from None

    async def _known(self, job: str) -> JobNote:
        note = _decode((await self._keep.notes.get(job)).value or b"")
        if note.status not in OVER and await self._is_marked(job):
            note.status = "cancelled"
        return note

    async def _seq(self, job: str) -> int:
        return int((await self._keep.notes.get(f"seq.{job}")).value or b"0")

    async def _is_marked(self, job: str) -> bool:
        try:
            await self._keep.notes.get(_mark(job))
        except nats.js.errors.NotFoundError:
            return False
        return True

    # --------------------------------------------------------------------------------------------------------- drawing
    async def _work(self) -> None:
        """Run one job after another, until cancelled."""
        queue = None
        while True:
            try:
                queue = queue or await self._keep.queue()
                for message in await queue.fetch(1, timeout=_FETCH):
                    await self._run(message)
            except ERRORS as error:  # the queue is empty, or NATS is unreachable
                if not isinstance(error, TimeoutError):
                    log.warning("jobs: %s", error or type(error).__name__)
                    queue = None
                    await asyncio.sleep(_PAUSE)

    async def _run(self, message: Msg) -> None:
        try:
            note = await self._known(message.data.decode())
        except nats.js.errors.NotFoundError:
            await message.ack()
            return
        if note.status in OVER:  # cancelled, or its acknowledgement was lost
            await self._note(note)
            await message.ack()
            return
        beating = asyncio.create_task(self._beat(message))
        try:
            await self._draw_unless_marked(note)
            await message.ack()
        except asyncio.CancelledError:
            with suppress(*ERRORS):
                await message.nak()
            raise
        except ERRORS:
            raise
        except Exception as error:
            await self._failed(message, note, as_motet_error(error))
        finally:
            beating.cancel()

    async def _beat(self, message: Msg) -> None:
        while True:
            await asyncio.sleep(self._keep.patience / 3)
            await message.in_progress()

    async def _failed(self, message: Msg, note: JobNote, error: MotetError) -> None:
        if error.retryable and message.metadata.num_delivered < _TRIES:
            log.warning("job %s: %s; it is tried again", note.id, error.message)
            await message.nak(delay=_PAUSE)
            return
        note.status, note.error = "failed", Problem.of(error).as_dict()
        await self._note(note)
        await message.ack()

    async def _draw_unless_marked(self, note: JobNote) -> None:
        """Generate the images, and stop if the job is cancelled."""
        drawing = asyncio.create_task(self._draw(note), name=f"job-{note.id}")
        try:
            while not drawing.done():
                await asyncio.wait((drawing,), timeout=_LOOK_EVERY)
                if not drawing.done() and await self._is_marked(note.id):
                    note.status = "cancelled"
                    break
        finally:
            drawing.cancel()
            await asyncio.wait((drawing,))
        if note.status == "cancelled":
            await self._note(note)
        else:
            drawing.result()

    async def _draw(self, note: JobNote) -> None:
        """Generate all images of a job, one after another."""
        model = model_of(self._bus.directory, ROLE, note.body.model)
        asked = requests(note.body, model, note.id)
        note.status, note.pictures = "running", []
        for number, request in enumerate(asked):
            drawn = await self._picture(note, request, number, len(asked))
            note.pictures.append(
                await self._keep.put_picture(drawn.data, request.format, owner_of(note.id))
            )
        note.status = "done"
        await self._note(note)

    async def _picture(self, note: JobNote, request: Draw, number: int, count: int) -> Drawn:
        drawn, told = Drawn(), 0.0
        strokes = draw(self._bus, await self._uploads(), request, drawn, deadline=self._deadline)
        async with aclosing(strokes):
            async for stroke in strokes:
                note.step, note.steps = number * stroke.steps + stroke.step, count * stroke.steps
                if time.monotonic() - told > _NOTE_EVERY:
                    told = time.monotonic()
                    await self._note(note)
        return drawn

    async def _note(self, note: JobNote) -> None:
        await self._keep.notes.put(note.id, msgspec.json.encode(note))


def public_id(job: str) -> str:
    """Return the id that the client uses, which is unique per owner only."""
    return job.rpartition(".")[2]


def _mark(job: str) -> str:
    """Return the key of the mark that a job is cancelled."""
    return f"stop.{job}"


def _check_same(note: JobNote, wanted: GenerationBody) -> None:
    known = note.body if wanted.seed is not None else msgspec.structs.replace(note.body, seed=None)
    if known != wanted:
        raise BadRequest(
            f"`id` {public_id(note.id)!r} is that of another job; choose a new one", param="id"
        )
