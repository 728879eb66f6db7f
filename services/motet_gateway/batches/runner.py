"""Run queued batches: take their leases, and give them back when they are over or lost."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from motet_gateway.context import GatewayContext
from motet_gateway.files.store import FileStore, created_at
from motet_gateway.http.problems import NotFound, Problem
from motet_gateway.storage.jetstream import ERRORS
from motet_gateway.storage.work_queue import Place
from motet_shared.errors import as_motet_error

from .cancelled import is_cancelled
from .queue import BatchQueue, Lease, QueuedBatch
from .run import BatchRun
from .store import BatchStore

log = logging.getLogger(__name__)

_POLL = 1.0  # seconds between two looks for batches that other gateways queued or lost
_STORED_WITHIN = 60.0  # seconds after which a queued batch that is not stored is dropped
_COOLING = 2.0  # seconds before a batch that could not go on is taken again


class BatchRunner:
    """Run up to `parallel` batches at a time."""

    def __init__(
        self, service: GatewayContext, files: FileStore, batches: BatchStore, queue: BatchQueue
    ):
        self._service, self._files, self._batches, self._queue = service, files, batches, queue
        self._slots = asyncio.Semaphore(service.config.batch_lines)
        self._running: dict[QueuedBatch, asyncio.Task[None]] = {}
        self._cooling: dict[QueuedBatch, float] = {}  # until when, by the monotonic clock
        self._loop: asyncio.Task[None] | None = None

    def start(self, parallel: int) -> None:
        if parallel:
            self._loop = asyncio.create_task(self._take_turns(parallel), name="batches")

    async def close(self) -> None:
        """Stop; batches that run are given back."""
        tasks = [task for task in (self._loop, *self._running.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _take_turns(self, parallel: int) -> None:
        while not is_cancelled():
            self._queue.added.clear()
            try:
                if len(self._running) < parallel:
                    await self._fill(parallel)
            except ERRORS as error:
                log.warning("batches: %s", error or type(error).__name__)
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL):
                    await self._queue.added.wait()

    async def _fill(self, parallel: int) -> None:
        """Take batches until `parallel` run here, or none is left."""
        now = time.monotonic()
        self._cooling = {batch: end for batch, end in self._cooling.items() if end > now}
        for batch in await self._queue.waiting():
            if len(self._running) >= parallel:
                return
            if batch in self._running or batch in self._cooling:
                continue
            if self._service.tenant_sites.place(batch.owner) is Place.ELSEWHERE:
                continue
            if (lease := await self._queue.take(batch)) is not None:
                task = asyncio.create_task(self._run(batch, lease), name=f"batch-{batch.id}")
                self._running[batch] = task

    async def _run(self, queued: QueuedBatch, lease: Lease) -> None:
        """Run a batch as long as its lease is held."""
        try:
            work = asyncio.create_task(self._until_over(queued), name=f"run-{queued.id}")
            lost = asyncio.create_task(lease.lost(), name=f"lease-{queued.id}")
            try:
                await asyncio.wait({work, lost}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                is_over = work.done() and not work.cancelled() and work.result()
                for task in (work, lost):
                    task.cancel()
                await asyncio.wait({work, lost})
            if is_over:
                await self._queue.remove(queued)
            elif lost.done():
                log.warning("batch %s: the lease is lost", queued.id)
            self._cooling[queued] = time.monotonic() + _COOLING
        except Exception:
            log.exception("batch %s", queued.id)
            self._cooling[queued] = time.monotonic() + _COOLING
        finally:
            self._running.pop(queued, None)
            await asyncio.shield(lease.release())
            self._queue.added.set()

    async def _until_over(self, queued: QueuedBatch) -> bool:
        """Run a batch; return True once it is over, False to try it again."""
        run: BatchRun | None = None
        try:
            batch = await self._batches.get(queued.owner, queued.id)
            run = BatchRun(
                self._service, self._files, self._batches, self._slots, queued.owner, batch
            )
            await run.until_over()
        except NotFound as error:
            if run is None:  # it is being stored, or never was
                return time.time() > created_at(queued.id) + _STORED_WITHIN
            await run.fail(Problem.of(error))  # its input file was deleted
        except Exception as error:
            known = as_motet_error(error)
            if known.retryable or run is None:
                log.warning("batch %s: %s; it is tried again", queued.id, known.message)
                return False
            await run.fail(Problem.of(error))
        return True
