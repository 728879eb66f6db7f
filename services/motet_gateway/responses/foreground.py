"""Answer a response to the client that waits for it: as events, or whole."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, suppress
from typing import Any

import msgspec

from motet_gateway.context import GatewayContext
from motet_gateway.http.asgi import ClientGone
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.problems import Problem
from motet_gateway.operations.metrics import server_timing
from motet_gateway.tenancy.tenant import Ticket
from motet_shared.errors import Unavailable

from .chat_request import ChatRequest
from .history import Conversation
from .output.events import Events
from .output.output import Output
from .reply import Reply, receive
from .resource import Resource, ended, failed
from .schema import ENCRYPTED, LOGPROBS, ResponseBody
from .store import StoredResponse

log = logging.getLogger(__name__)


class Foreground:
    """Run one response whose client waits.

    A response that is to be stored is stored before its client hears that it has ended, so that it
    can be the previous one of the next at once. One whose client leaves is not stored.
    """

    def __init__(
        self,
        service: GatewayContext,
        http: Exchange,
        body: ResponseBody,
        asked: ChatRequest,
        conversation: Conversation,
        resource: Resource,
        ticket: Ticket,
    ):
        self._service, self._http = service, http
        self._asked, self._conversation = asked, conversation
        self._resource = resource
        self._reply = Reply(service, asked, ticket, shorten=body.truncation == "auto")
        self._events = Events() if body.stream else None
        self._output = new_output(body, asked, str(resource["id"]), self._events)

    async def collect(self) -> None:
        """Send the whole response as one JSON body."""
        async with self._http.while_connected():
            async with aclosing(self._reply.attempts()) as batches:
                async for batch in batches:
                    receive(self._output, batch, self._asked.generation)
            resource = await self._end()
            timing = self._reply.track
            headers = [(b"server-timing", server_timing(timing.stopwatch))] if timing else []
            await self._http.reply(200, msgspec.json.encode(resource), headers)

    async def stream(self) -> None:
        """Send events. An error before the first text is raised; a later one ends the stream."""
        try:
            await self._stream()
        except (ClientGone, asyncio.CancelledError):
            raise
        except Exception as error:
            if not self._http.started:
                raise
            problem = Problem.of(error)
            problem.note(self._http.scope["path"])
            await self._fail(problem)

    async def _stream(self) -> None:
        events = self._events or Events()
        add_opening(events, self._resource)
        async with self._http.while_connected():
            async with aclosing(self._reply.attempts()) as batches:
                async for batch in batches:
                    receive(self._output, batch, self._asked.generation)
                    # Blocks while the client does not read: its reply then gets no more credit.
                    if data := events.take():
                        await self._http.write(data)
            resource = await self._end()
            add_end(events, resource)
            await self._http.finish(events.take())

    async def _end(self) -> Resource:
        """End the output and store the response; return it."""
        end = self._reply.end
        self._output.finish("incomplete" if end.status == "length" else "completed")
        resource = ended(self._resource, end.status, self._output.items, end.usage)
        await self._store(resource)
        return resource

    async def _fail(self, problem: Problem) -> None:
        events = self._events or Events()
        self._output.finish("incomplete")
        resource = failed(self._resource, problem, self._output.items)
        with suppress(Unavailable):
            await self._store(resource)
        add_end(events, resource)
        await self._http.finish(events.take())

    async def _store(self, resource: Resource) -> None:
        store = self._service.responses
        if store is None or not resource["store"]:
            return
        record = StoredResponse(resource=resource, chain=self._conversation.chain)
        owner = self._http.tenant.owner
        await store.finish(owner, record, self._conversation.own, self._service.config.patience)


def new_output(
    body: ResponseBody, asked: ChatRequest, response_id: str, events: Events | None
) -> Output:
    return Output(
        response_id,
        events,
        custom=asked.tools.custom,
        logprobs=LOGPROBS in body.included,
        encrypted=ENCRYPTED in body.included,
    )


def add_opening(events: Events, resource: Resource) -> None:
    """Add the events that begin a stream."""
    events.add("response.created", response=resource)
    if resource["background"]:
        events.add("response.queued", response=resource)
    events.add("response.in_progress", response={**resource, "status": "in_progress"})


def add_end(events: Events, resource: dict[str, Any]) -> None:
    """Add the event that ends a stream."""
    status = resource["status"]
    kind = status if status in ("completed", "incomplete", "failed") else "incomplete"
    events.add(f"response.{kind}", response=resource)
