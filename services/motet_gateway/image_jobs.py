"""Pictures as jobs: taken in, drawn when there is room, and kept, whatever restarts meanwhile.

A job is a note (JobNote) and a place in a work queue. A gateway takes one from the queue, draws it and says so; while
it is at work it gives signs of life. If it dies, the job goes to another gateway, or to the same one once it is back.
The seed is fixed when the job is taken in, so a second try draws the same picture. A job that is cancelled has a mark
beside its note, for which whoever draws it looks: notes are written by those who draw, marks by those who cancel.
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

from motet_pipelines.draw import ROLE, Drawn, draw
from motet_shared.blobs import BlobStore
from motet_shared.bus import Bus
from motet_shared.errors import BadRequest, MotetError, Unavailable, as_motet_error
from motet_shared.messages import Draw

from .aliases import model_of
from .images_schema import GenerationBody, check, requests
from .keep import ERRORS, Keep
from .problems import NotFound, Problem
from .wire import fresh_seed

log = logging.getLogger(__name__)

_TRIES = 5  # after which a job has failed
_PAUSE = 2.0  # seconds before the next one
_NOTE_EVERY = 0.5  # seconds between two notes of progress
_FETCH = 5.0  # seconds
_LOOK_EVERY = 0.1  # seconds between two looks for the mark of a job that is drawn: a watch survives no restart of NATS


class JobNote(Struct, kw_only=True, omit_defaults=True):
    """What is known of a job."""

    id: str
    body: GenerationBody
    created: int  # Unix seconds
    status: Literal["queued", "running", "done", "failed", "cancelled"] = "queued"
    seq: int = 0  # its number in the queue
    step: int = 0  # of all its pictures together
    steps: int = 0
    pictures: list[str] = []  # names
    error: dict[str, str | None] | None = None


OVER = ("done", "failed", "cancelled")
_decode = msgspec.json.Decoder(JobNote).decode


class ImageJobs:
    """Takes jobs in, and draws them, `parallel` at a time."""

    def __init__(self, bus: Bus, keep: Keep, uploads: Callable[[], Coroutine[Any, Any, BlobStore]], deadline: float):
        self._bus, self._keep, self._uploads, self._deadline = bus, keep, uploads, deadline
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, parallel: int) -> None:
        self._tasks = [asyncio.create_task(self._work(), name=f"image-jobs-{n}") for n in range(parallel)]

    async def close(self) -> None:
        """What is being drawn goes back into the queue."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------------- taking in
    async def submit(self, job: str, body: GenerationBody) -> tuple[JobNote, bool]:
        """Take a job in; whether it is a new one. One that is here already, with the same body, is told again.

        BadRequest for another body.
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
                await self._keep.notes.create(job, msgspec.json.encode(note))
            except nats.js.errors.KeyWrongLastSequenceError:
                note, fresh = await self._known(job), False
                _check_same(note, wanted)
            if note.status == "queued":
                await self._keep.notes.put(f"seq.{job}", b"%d" % await self._keep.enqueue(job))
        except ERRORS as error:
            raise Unavailable(f"the job cannot be kept: {error or type(error).__name__}; send it again") from None
        return note, fresh

    async def has(self, job: str) -> bool:
        """Whether it was taken in before; Unavailable if nobody can tell."""
        try:
            await self._keep.notes.get(job)
        except nats.js.errors.NotFoundError:
            return False
        except ERRORS as error:
            raise Unavailable(f"the job cannot be kept: {error or type(error).__name__}; send it again") from None
        return True

    async def status(self, job: str) -> tuple[JobNote, int | None]:
        """What is known, and how many are before it while it waits. NotFound for an unknown or an old one."""
        try:
            note = await self._known(job)
            if note.status != "queued":
                return note, None
            return note, await self._keep.position(await self._seq(job))
        except nats.js.errors.NotFoundError:
            raise NotFound(f"job {public_id(job)[:60]!r} is not here; it may have expired") from None
        except ERRORS as error:
            raise Unavailable(f"the job cannot be read: {error or type(error).__name__}; try again") from None

    async def cancel(self, job: str) -> JobNote:
        """It is drawn no more, as often as it is said; one that is over stays as it is. NotFound as for `status`."""
        try:
            note = await self._known(job)
            if note.status in OVER:
                return note
            await self._keep.notes.put(_mark(job), b"")
            if note.status == "queued":
                with suppress(nats.js.errors.NotFoundError):  # it is not in the queue yet
                    await self._keep.withdraw(await self._seq(job))
                note.status = "cancelled"
                await self._note(note)
            return await self._known(job)
        except nats.js.errors.NotFoundError:
            raise NotFound(f"job {public_id(job)[:60]!r} is not here; it may have expired") from None
        except ERRORS as error:
            raise Unavailable(f"the job cannot be cancelled: {error or type(error).__name__}; try again") from None

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
        """Take one job after another, until cancelled."""
        queue = None
        while True:
            try:
                queue = queue or await self._keep.queue()
                for message in await queue.fetch(1, timeout=_FETCH):
                    await self._run(message)
            except ERRORS as error:  # there is none, or the server is away
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
        if note.status in OVER:  # it was cancelled, or its acknowledgement was lost
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
        """Draw, and stop when the job is cancelled."""
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
        """All pictures of a job, one after another."""
        model = model_of(self._bus.directory, ROLE, note.body.model)
        asked = requests(note.body, model, note.id)
        note.status, note.pictures = "running", []
        for number, request in enumerate(asked):
            drawn = await self._picture(note, request, number, len(asked))
            note.pictures.append(await self._keep.put_picture(drawn.data, request.format))
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
    """As its client named it: ids of different owners may be the same."""
    return job.rpartition(".")[2]


def _mark(job: str) -> str:
    """The key that says that a job is cancelled."""
    return f"stop.{job}"


def _check_same(note: JobNote, wanted: GenerationBody) -> None:
    known = note.body if wanted.seed is not None else msgspec.structs.replace(note.body, seed=None)
    if known != wanted:
        raise BadRequest(f"`id` {public_id(note.id)!r} is that of another job; choose a new one", param="id")
