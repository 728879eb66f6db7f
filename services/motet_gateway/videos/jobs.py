"""Make videos as durable jobs, which survive restarts of all processes.

A job is a record (Video) and an entry of a work queue. A gateway takes an entry, has the video made
and acknowledges it. If the diffusion service dies, another instance goes on from the last
checkpoint; if the gateway dies, the job is delivered to another one, which makes the same video
from the same seed. A gateway writes the record at every change of its revision that it knows: if
that fails, the video was deleted, or is another gateway's by now.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec

from motet_gateway.files.store import created_at
from motet_gateway.http.problems import NotFound, Problem
from motet_gateway.images.schema import CHECKPOINT_EVERY, size_of
from motet_gateway.openai.aliases import VIDEO, model_of
from motet_gateway.storage.jetstream import ERRORS, unavailable
from motet_gateway.storage.work_queue import Place, WorkQueue
from motet_gateway.tenancy.tenant_sites import TenantSites
from motet_pipelines.images.draw import Drawn, draw
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import (
    MotetError,
    Unavailable,
    UnknownModel,
    as_motet_error,
)
from motet_shared.messages import Draw
from motet_shared.wire.bus import Bus

from .store import OVER, Video, VideoStore

log = logging.getLogger(__name__)

_AWAY = (
    Unavailable,
    UnknownModel,
)  # a model that was there when the video was asked for
_MAX_ATTEMPTS = 5  # attempts after which a job has failed
_STORED_WITHIN = 5.0  # seconds after which a video in the queue is waited for no longer
_STORED_EVENTUALLY = 60.0  # seconds after which one that is not stored was deleted
_POLL = 0.05  # seconds
_SAVE_INTERVAL = 0.5  # seconds between two updates of a record
_PREVIEWS = 4
_T = TypeVar("_T")
_DONE = 99  # percent of a video that is made and not stored yet


class VideoJobs:
    """Make `parallel` videos at a time. deadline: seconds for one attempt."""

    def __init__(
        self,
        bus: Bus,
        store: VideoStore,
        queue: WorkQueue,
        uploads: Callable[[], Coroutine[Any, Any, BlobStore]],
        deadline: float,
        sites: TenantSites,
    ):
        self._bus, self.store, self._queue = bus, store, queue
        self._uploads, self._deadline, self._sites = uploads, deadline, sites
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, parallel: int) -> None:
        self._tasks = [
            asyncio.create_task(self._queue.work(self._run, self._place), name=f"video-jobs-{n}")
            for n in range(parallel)
        ]

    async def close(self) -> None:
        """Stop; videos that are being made are returned to the queue."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def submit(self, owner: str, video: Video) -> None:
        """Enqueue and store a video. Raises Unavailable if the store does not answer.

        It is enqueued first: one that is stored is in the queue, whatever ends in between.
        """
        try:
            await self._queue.push(f"{owner}:{video.id}")
        except ERRORS as error:
            raise unavailable("the video cannot be queued", error) from None
        await self.store.create(owner, video)

    # ---------------------------------------------------------------------------------- making
    def _place(self, job: str) -> Place:
        return self._sites.place(job.rpartition(":")[0])

    async def _run(self, job: str, attempt: int) -> bool:
        """Make one video; return True once it is over, False to try it again."""
        owner, _, video_id = job.rpartition(":")
        try:
            video = await self._stored(owner, video_id)
        except NotFound:
            return time.time() > created_at(video_id) + _STORED_EVENTUALLY
        revision = await self.store.revision(owner, video_id)
        if revision is None:
            return True
        if video.status in OVER:  # its gateway ended between that and `close`
            await self.store.close(owner, video_id)
            return True
        attempted = _Attempt(self, owner, video, revision)
        try:
            with self._sites.limited(owner):
                return await attempted.run()
        except Exception as error:
            return await self._failed(attempted, attempt, as_motet_error(error))

    async def _stored(self, owner: str, video_id: str) -> Video:
        """Return a video; waits for one that is being stored. Raises NotFound if it is not by then."""
        while True:
            try:
                return await self.store.get(owner, video_id)
            except NotFound:
                if time.time() > created_at(video_id) + _STORED_WITHIN:
                    raise
            await asyncio.sleep(_POLL)

    async def _failed(self, attempted: _Attempt, attempt: int, error: MotetError) -> bool:
        """Record why an attempt failed; return False if another one may succeed."""
        video = attempted.video
        is_away = isinstance(error, _AWAY) and time.time() < video.created_at + self._deadline
        is_over = video.status in OVER  # and stored, or to be: only its end failed
        if is_over or is_away or (error.retryable and attempt < _MAX_ATTEMPTS):
            log.warning("%s: %s; it is tried again", video.id, error.message)
            return False
        video.status, video.error = "failed", Problem.of(error).as_dict()
        await attempted.end()
        return True

    async def drawn(self, owner: str, video: Video) -> tuple[Drawn, Any]:
        """Return the result of a video, and the generator of its strokes that fills it."""
        outcome = Drawn()
        image = None if video.image is None else await self.store.read(owner, video.image)
        request = request_of(video, model_of(self._bus.directory, VIDEO, video.model))
        store = await self._uploads()
        return outcome, draw(
            self._bus, store, request, outcome, image=image, deadline=self._deadline
        )


class _Attempt:
    """Make one video, as long as its record has the known revision."""

    def __init__(self, jobs: VideoJobs, owner: str, video: Video, revision: int):
        self._jobs, self._store, self._owner = jobs, jobs.store, owner
        self.video, self._revision = video, revision
        self._is_lost = False
        self._unanswered: Video | None = (
            None  # the record that was stored last, if the store did not say so
        )

    async def run(self) -> bool:
        """Make the video; return True, also if it was deleted or is another gateway's by now."""
        making = asyncio.create_task(self._make(), name=f"job-{self.video.id}")
        try:
            while not making.done() and await self._is_kept():
                await asyncio.wait((making,), timeout=_SAVE_INTERVAL)
        finally:
            making.cancel()
            await asyncio.wait((making,))
        if self._is_lost:
            await self._forget_files()
        else:
            data, seconds, width, height = making.result()
            await self._complete(data, seconds, f"{width}x{height}")
        return True

    async def end(self) -> None:
        """Store the video as over."""
        if await _patiently(self._save):
            await self._store.close(self._owner, self.video.id)
        else:
            await self._forget_files()

    async def _forget_files(self) -> None:
        """Delete the files of a video that was deleted while it was made."""
        if await self._store.revision(self._owner, self.video.id) is None:
            await self._store.delete(self._owner, self.video)

    async def _is_kept(self) -> bool:
        """Save; return False if the video is this gateway's no longer.

        While the store does not answer, the video is made on.
        """
        try:
            return await self._save()
        except Unavailable as error:
            log.warning("%s: %s; it is made on", self.video.id, error.message)
            return True

    async def _save(self) -> bool:
        """Store what is known; return False if the video is this gateway's no longer."""
        if self._unanswered is not None:
            stored = await self._store.revision_of(self._owner, self._unanswered)
            self._revision = stored or self._revision
        self._unanswered = msgspec.structs.replace(self.video)
        revision = await self._store.replace(self._owner, self._unanswered, self._revision)
        self._unanswered = None
        self._is_lost, self._revision = revision is None, revision or 0
        return not self._is_lost

    async def _make(self) -> tuple[bytes, float, int, int]:
        video = self.video
        outcome, strokes = await self._jobs.drawn(self._owner, video)
        video.status = "in_progress"
        async with aclosing(strokes):
            async for stroke in strokes:
                video.progress = _DONE * stroke.step // stroke.steps
                if stroke.preview:
                    await self._keep_preview(stroke.preview)
        return outcome.data, outcome.seconds, outcome.width, outcome.height

    async def _keep_preview(self, data: bytes) -> None:
        """Replace the preview of the video; without room for it there is none."""
        before = self.video.preview
        try:
            self.video.preview = await self._store.write(self._owner, "preview.webp", data)
        except MotetError as error:
            log.info("%s: no preview: %s", self.video.id, error.message)
            return
        if before is not None:
            await self._store.files.delete(self._owner, before)

    async def _complete(self, data: bytes, seconds: float, size: str) -> None:
        video = self.video
        name = f"{video.id}.{video.format}"
        video.content = await _patiently(lambda: self._store.write(self._owner, name, data))
        video.seconds, video.size = seconds, size
        video.status, video.progress, video.completed_at = "completed", 100, int(time.time())
        await self.end()


async def _patiently(act: Callable[[], Awaitable[_T]]) -> _T:
    """Repeat an act of the store until it answers, for at most _STORED_EVENTUALLY seconds."""
    end = time.monotonic() + _STORED_EVENTUALLY
    while True:
        try:
            return await act()
        except Unavailable:
            if time.monotonic() > end:
                raise
        await asyncio.sleep(_SAVE_INTERVAL)


def request_of(video: Video, model: str) -> Draw:
    """Return the request for a video."""
    width, height = size_of(video.size)
    return Draw(
        model=model,
        prompt=video.prompt,
        negative_prompt=video.negative_prompt,
        width=width,
        height=height,
        steps=video.steps,
        guidance_scale=video.guidance_scale,
        seed=video.seed,
        seconds=video.seconds,
        previews=_PREVIEWS,
        checkpoint_every=CHECKPOINT_EVERY,
        format=video.format,
        request_id=video.id,
    )
