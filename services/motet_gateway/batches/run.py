"""Run one batch on the gateway that holds its lease: check the file, answer its lines, end it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from itertools import count

import msgspec

from motet_gateway.context import GatewayContext
from motet_gateway.files.store import FileStore
from motet_gateway.http.problems import NotFound, Problem
from motet_gateway.tenancy.concurrency import ConcurrencyLimits
from motet_gateway.tenancy.tenant import Tenant
from motet_shared.errors import BadRequest, Unavailable

from .answer import Answer, answer
from .cancelled import is_cancelled
from .lines import Line, check_file, digest, lines_of, request_of
from .results import ResultFile
from .schema import BatchLine
from .store import OVER, Batch, BatchStore, LineError, Status

log = logging.getLogger(__name__)

MOST_SHOWN = 100  # errors of lines in the batch object; its error file has more
MOST_ERRORS = 10_000  # errors of lines after which the check of a file stops
_MOST_BREAKS = 3  # attempts of a line during which the service that worked on it ended
_FLUSH_EVERY = 0.5  # seconds between two parts of the result
_SAVE_EVERY = 2.0  # seconds between two notes of the progress
_MOST_PENDING = 1 << 20  # bytes of answers that are not stored yet
_POLL = 0.5  # seconds between two looks whether a batch was cancelled, or its tenant has tokens
_LONGEST_RETRY = 30.0  # seconds before a line is tried again


class BatchRun:
    """Run one batch. `slots`: the lines that this gateway runs at a time."""

    def __init__(
        self,
        service: GatewayContext,
        files: FileStore,
        batches: BatchStore,
        slots: asyncio.Semaphore,
        owner: str,
        batch: Batch,
    ):
        self._service, self._files, self._batches = service, files, batches
        self._slots, self._owner, self._batch = slots, owner, batch
        self._lines_here = asyncio.Semaphore(service.config.batch_lines)  # lines in memory
        self._answered_at = time.monotonic()  # when a line was answered last
        self._concurrency = ConcurrencyLimits(service.config.batch_lines)
        self._output = ResultFile(files, owner, batch.output)
        self._errors = ResultFile(files, owner, batch.error)
        self._done: set[bytes] = set()  # digests of the custom ids that are answered
        self._flushing = asyncio.Lock()
        self._saved_at = 0.0

    async def until_over(self) -> None:
        """Run the batch; return once it is over and stored as such.

        Raises LeaseLost, Unavailable or another retryable error if it shall be run again later.
        """
        if self._batch.status in OVER:
            return
        if "in_progress" not in self._batch.at and not await self._check():
            return
        status = await self._answer()
        await self._end(status)

    async def fail(self, problem: Problem) -> None:
        """End the batch because of an error that is not one of a line."""
        error = LineError(problem.code, problem.message, param=problem.param)
        self._batch.errors.append(error)
        await self._end("failed")

    # --------------------------------------------------------------------------------- checking
    async def _check(self) -> bool:
        """Check the input file; return False if the batch is over thereby."""
        batch = self._batch
        if batch.status == "cancelling":
            await self._end("cancelled")
            return False
        try:
            parts = await self._parts()
        except NotFound as error:
            await self.fail(Problem.of(error))
            return False
        most = self._service.config.max_body
        checked = await check_file(parts, batch.endpoint, most, MOST_ERRORS)
        batch.counts.total = checked.total
        if checked.errors:
            await self._refuse(checked.errors)
            return False
        batch.enter("in_progress")
        await self._batches.save(self._owner, batch)
        return True

    async def _refuse(self, errors: list[LineError]) -> None:
        self._batch.errors = errors[:MOST_SHOWN]
        await self._errors.answered()
        for error in errors[self._errors.count :]:
            self._errors.add(_failed(None, error))
        await self._flush()
        await self._end("failed")

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        file = await self._files.get(self._owner, self._batch.input_file_id)
        return self._files.read(self._owner, file)

    # -------------------------------------------------------------------------------- answering
    async def _answer(self) -> Status:
        """Answer all lines that are not answered yet; return how the batch ends.

        Raises Unavailable if none is answered for long, so that other batches have their turn.
        """
        for results in (self._output, self._errors):
            self._done.update(map(digest, await results.answered()))
        self._answered_at = time.monotonic()
        work = asyncio.create_task(self._answer_lines(), name=f"lines-{self._batch.id}")
        try:
            while True:
                left = self._batch.expires_at - time.time()
                await asyncio.wait({work}, timeout=max(min(_POLL, left), 0))
                if work.done():
                    work.result()
                    return "completed"
                if left <= 0:
                    break
                if await self._is_cancelled():
                    return "cancelled"
                if time.monotonic() > self._answered_at + self._service.config.request_timeout:
                    raise Unavailable("none of its lines can be answered for now")
        finally:
            work.cancel()
            await asyncio.wait({work})
        await self._expire()
        return "expired"

    async def _is_cancelled(self) -> bool:
        with suppress(Unavailable):  # it is looked for again
            at = await self._batches.cancelled_at(self._owner, self._batch.id)
            if at is not None:
                self._batch.at["cancelling"] = at
                return True
        return False

    async def _answer_lines(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                recording = group.create_task(self._record())
                async with asyncio.TaskGroup() as answers, aclosing(self._lines()) as lines:
                    async for line in lines:
                        await self._lines_here.acquire()
                        task = answers.create_task(self._answer_line(line))
                        # Also if it is cancelled before it begins.
                        task.add_done_callback(lambda _: self._lines_here.release())
                recording.cancel()
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        await self._flush()

    async def _lines(self) -> AsyncGenerator[BatchLine, None]:
        """Yield the requests that are not answered yet."""
        parts = await self._parts()
        async with aclosing(lines_of(parts, self._service.config.max_body)) as lines:
            async for line in lines:
                request = _request(line)
                if digest(request.custom_id) not in self._done:
                    yield request

    async def _answer_line(self, request: BatchLine) -> None:
        found = await self._answered(request)
        if is_cancelled():
            raise asyncio.CancelledError
        body = {
            "id": "batch_req_" + secrets.token_hex(12),
            "custom_id": request.custom_id,
            "response": {
                "status_code": found.status,
                "request_id": f"{self._batch.id}.{request.custom_id}"[:128],
                "body": msgspec.Raw(found.body),
            },
            "error": None,
        }
        results = self._output if found.status == 200 else self._errors
        results.add(msgspec.json.encode(body))
        self._answered_at = time.monotonic()
        self._done.add(digest(request.custom_id))
        if results.pending_bytes > _MOST_PENDING:
            await self._flush()

    async def _answered(self, request: BatchLine) -> Answer:
        """Return the answer to a request, which is tried again after errors that may pass."""
        breaks = 0
        for attempt in count():
            tenant = await self._tenant()
            async with self._slots:  # not while the line waits: other tenants need them
                found = await answer(self._service, tenant, request, "req_" + secrets.token_hex(12))
            breaks += found.broke
            if found.retry_after is None or breaks >= _MOST_BREAKS or is_cancelled():
                return found
            await asyncio.sleep(min(found.retry_after * 2 ** min(attempt, 5), _LONGEST_RETRY))
        raise AssertionError("unreachable")

    async def _tenant(self) -> Tenant:
        """Return the tenant once at least half of its tokens per minute are left.

        So its batches leave room for its other requests.
        """
        while True:
            tenant = self._service.authenticator.tenant(self._owner)
            if tenant is None:
                raise BadRequest("the tenant of this batch does not exist any more")
            bucket = tenant.tokens.bucket
            if bucket is None or 2 * bucket.level >= bucket.limit:
                return tenant.in_background(self._concurrency)
            await asyncio.sleep(_POLL)

    # -------------------------------------------------------------------------------- recording
    async def _record(self) -> None:
        """Store answers as they come, and the progress now and then."""
        while not is_cancelled():
            await asyncio.sleep(_FLUSH_EVERY)
            with suppress(Unavailable):  # the answers are stored next time, or the lease is lost
                await self._flush()
                if time.monotonic() - self._saved_at >= _SAVE_EVERY:
                    self._saved_at = time.monotonic()
                    await self._batches.save(self._owner, self._batch)

    async def _flush(self) -> None:
        async with self._flushing:
            await self._output.flush()
            await self._errors.flush()
            counts = self._batch.counts
            counts.completed, counts.failed = self._output.count, self._errors.count

    async def _expire(self) -> None:
        """Record an error for each line that is not answered."""
        error = LineError("batch_expired", "this request was not answered within the window")
        with suppress(NotFound):  # the input file was deleted, or has expired too
            async with aclosing(self._lines()) as lines:
                async for request in lines:
                    self._errors.add(_failed(request.custom_id, error))
                    if self._errors.pending_bytes > _MOST_PENDING:
                        await self._flush()
        await self._flush()

    async def _end(self, status: Status) -> None:
        """Make the results readable, and store the batch as over."""
        batch = self._batch
        if status != "failed":
            await self._flush()
        if status == "completed":
            batch.enter("finalizing")
        name = f"{batch.id}_{{}}.jsonl".format
        batch.has_output = await self._output.close(name("output"), batch.output_ttl)
        batch.has_error = await self._errors.close(name("error"), batch.output_ttl)
        batch.enter(status)
        await self._batches.save(self._owner, batch)


def _request(line: Line) -> BatchLine:
    """Return the request of a line; its file was checked and cannot change."""
    if line.data is None:
        raise BadRequest(f"line {line.number} is longer than this server accepts (--max-body)")
    return request_of(line.data)


def _failed(custom_id: str | None, error: LineError) -> bytes:
    """Return a line of the error file for a request that has no response."""
    body = {
        "id": "batch_req_" + secrets.token_hex(12),
        "custom_id": custom_id,
        "response": None,
        "error": error,
    }
    return msgspec.json.encode(body)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return an error of a group of groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
