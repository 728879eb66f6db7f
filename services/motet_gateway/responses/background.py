"""Run responses in the background, as jobs of a durable queue.

What a response has said is stored while it runs. If its gateway dies, another one, or the same after
its restart, goes on behind the last token that was stored: the chat resumes as it does when a
tokenizer dies, with the same seed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import aclosing
from functools import cached_property

from motet_gateway.context import GatewayContext
from motet_gateway.http.problems import NotFound, Problem
from motet_gateway.storage.work_queue import Place, WorkQueue
from motet_gateway.tenancy.tenant import Tenant
from motet_gateway.tenancy.usage import expected_tokens
from motet_pipelines.chat.chat import received_length
from motet_shared.errors import BadRequest, as_motet_error
from motet_shared.messages import Resume, Text
from motet_shared.process import telemetry

from .chat_request import ChatRequest, chat_request
from .foreground import new_output
from .history import PreviousResponseNotFound, stored_conversation
from .output.output import Output
from .reply import Reply
from .resource import OVER, Resource, cancelled, ended, failed
from .schema import ResponseBody
from .store import ResponseStore, Stop, StoredResponse

log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 30  # attempts after which a response has failed
_POLL = 0.2  # seconds between two looks whether a running response shall end
_STORE_EVERY = 0.25  # seconds between two parts of the log


class BackgroundResponses:
    """Run up to `parallel` queued responses at a time."""

    def __init__(self, service: GatewayContext, store: ResponseStore, queue: WorkQueue):
        self._service, self._store, self._queue = service, store, queue
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, parallel: int) -> None:
        self._tasks = [
            asyncio.create_task(
                self._queue.work(self._run, self._place), name=f"responses-{number}"
            )
            for number in range(parallel)
        ]

    async def close(self) -> None:
        """Stop; responses that run return to the queue."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _place(self, job: str) -> Place:
        return self._service.tenant_sites.place(job.partition(".")[0])

    async def _run(self, job: str, attempt: int) -> bool:
        """Run one response; return True once it is over, False to try it again."""
        owner, _, response_id = job.partition(".")
        run: _Run | None = None
        try:
            record = await self._store.get(owner, response_id)
            if record.status in OVER:
                return True
            run = _Run(self._service, self._store, owner, record)
            with self._service.tenant_sites.limited(owner):
                await run.until_over()
        except PreviousResponseNotFound as error:  # deleted while this one waited
            if run is None:
                raise
            await run.fail(Problem.of(error))
        except NotFound:  # it was deleted, or has expired
            return True
        except Exception as error:
            known = as_motet_error(error)
            if known.retryable and attempt < _MAX_ATTEMPTS:
                log.warning("response %s: %s; it is tried again", response_id, known.message)
                return False
            if run is None:
                raise
            await run.fail(Problem.of(error))
        return True


class _Run:
    """Run one response on this gateway."""

    def __init__(
        self, service: GatewayContext, store: ResponseStore, owner: str, record: StoredResponse
    ):
        self._service, self._store = service, store
        self._owner, self._record = owner, record
        self._output: Output | None = None

    @cached_property
    def _body(self) -> ResponseBody:
        return self._record.asked

    async def until_over(self) -> None:
        """Answer the response, and store it; end it if it is cancelled or deleted."""
        resource = None if await self._stop() else await self._answered()
        stop = await self._stop()
        if stop is Stop.DELETED:  # parts of the log, or the record, may have been stored since
            await self._store.delete(self._owner, self._record)
        elif stop is Stop.CANCELLED or resource is None:
            await self._save(cancelled(self._record.resource, self._items))
        else:
            await self._save(resource)

    async def _stop(self) -> Stop | None:
        return await self._store.stop_of(self._owner, self._record.id)

    async def _answered(self) -> Resource | None:
        """Return the response after its end, None if it was stopped before."""
        answering = asyncio.create_task(self._answer(), name=f"response-{self._record.id}")
        try:
            while not answering.done() and not await self._stop():
                await asyncio.wait((answering,), timeout=_POLL)
        finally:
            answering.cancel()
            await asyncio.wait((answering,))
        return None if answering.cancelled() else answering.result()

    async def fail(self, problem: Problem) -> None:
        await self._save(failed(self._record.resource, problem, self._items))

    @property
    def _items(self) -> list[Resource]:
        """Return the output so far."""
        return self._output.snapshot if self._output is not None else []

    async def _save(self, resource: Resource) -> None:
        """Store the response after its end."""
        self._record.resource = resource
        patience = self._service.config.patience
        await self._store.finish(self._owner, self._record, None, patience)
        if not (self._record.body or {}).get("stream"):  # it cannot be followed
            await self._store.delete_log(self._owner, self._record.id)

    # ---------------------------------------------------------------------------------- answering
    async def _answer(self) -> Resource:
        token = telemetry.request_id.set(self._record.request_id)
        try:
            asked, tenant = await self._asked()
            with await tenant.take(1, tokens=expected_tokens([asked.chat])) as ticket:
                await self._begin()
                reply = Reply(self._service, asked, ticket, shorten=self._body.truncation == "auto")
                self._output = new_output(self._body, asked, self._record.id, None)
                await self._receive(reply, self._output)
                end = reply.end
                self._output.finish("incomplete" if end.status == "length" else "completed")
                return ended(self._record.resource, end.status, self._output.items, end.usage)
        finally:
            telemetry.request_id.reset(token)

    async def _asked(self) -> tuple[ChatRequest, Tenant]:
        config, record = self._service.config, self._record
        tenant = self._service.authenticator.tenant(self._owner)
        if tenant is None:
            raise BadRequest("the tenant of this response does not exist any more")
        placed = await stored_conversation(
            self._store,
            self._owner,
            record,
            config.max_body,
            truncate=self._body.truncation == "auto",
        )
        asked = await chat_request(
            self._service, tenant, self._body, placed, record.request_id, record.seed
        )
        return asked, tenant

    async def _begin(self) -> None:
        if self._record.status == "queued":
            self._record.resource = {**self._record.resource, "status": "in_progress"}
            await self._store.save(self._owner, self._record)

    async def _receive(self, reply: Reply, output: Output) -> None:
        """Receive the reply behind what is in the log, and add it to the log."""
        part, known = await self._logged()
        output.add(known)
        pending: list[Text] = []
        stored_at = time.monotonic()
        async with aclosing(reply.attempts(_resume(known))) as batches:
            async for batch in batches:
                output.add(batch)
                pending += batch
                if time.monotonic() - stored_at >= _STORE_EVERY:
                    await self._store.append(self._owner, self._record.id, part, pending)
                    part, pending, stored_at = part + 1, [], time.monotonic()
        if pending:
            await self._store.append(self._owner, self._record.id, part, pending)

    async def _logged(self) -> tuple[int, list[Text]]:
        """Return the number of the next part of the log, and what it has so far."""
        texts: list[Text] = []
        part = 0
        while (found := await self._store.log(self._owner, self._record.id, part)) is not None:
            texts += found
            part += 1
        return part, texts


def _resume(texts: Sequence[Text]) -> Resume | None:
    if not texts:
        return None
    ids = [token for text in texts for token in text.ids]
    return Resume(ids, sum(map(received_length, texts)))
