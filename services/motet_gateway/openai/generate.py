"""Run the requests of one HTTP call, streamed or whole.

The endpoints differ only in the renderer that they pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from motet_gateway.context import GatewayContext
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.problems import Problem
from motet_gateway.operations.loading import unloaded, while_loading
from motet_gateway.operations.metrics import server_timing
from motet_gateway.tenancy.tenant import Ticket
from motet_gateway.tenancy.usage import ReplyMeter, prompt_tokens
from motet_pipelines.chat.chat import Outcome
from motet_shared.errors import InternalError, MotetError
from motet_shared.messages import Chat, Complete, End, Text, Usage

from .render import DONE, Chunks, error_event
from .results import Collected, add_usage

Source = Callable[[Any, Outcome], AsyncGenerator[list[Any], None]]  # opens the reply to a request


class ChoiceStreams:
    """Run the choices of one call, each as a stream of its own."""

    def __init__(
        self,
        service: GatewayContext,
        http: Exchange,
        requests: Sequence[Chat | Complete],
        source: Source,
        ticket: Ticket,
        prompts: int = 1,
    ):
        self._http, self._directory = http, service.bus.directory
        self._requests = requests
        self._source = source
        self._prompts = prompts
        self._outcomes = [Outcome() for _ in requests]
        self._named = [0 for _ in requests]  # targets of each outcome that have been noted
        self._tracks = [
            service.metrics.begin(request.model, outcome, meter)
            for request, outcome, meter in zip(
                requests, self._outcomes, self._meters(ticket), strict=True
            )
        ]

    def _meters(self, ticket: Ticket) -> list[ReplyMeter]:
        """Return one meter per choice.

        Only the first choice of each prompt is charged for the prompt, as in the usage of the
        reply.
        """
        share = max(len(self._requests) // self._prompts, 1)
        return [
            ReplyMeter(ticket, None if index % share else prompt_tokens(request))
            for index, request in enumerate(self._requests)
        ]

    async def stream(self, chunks: Chunks) -> None:
        """Send server-sent events.

        An error before the first text is raised; a later one is sent as an event and ends the
        stream.
        """
        try:
            async with self._http.while_connected():
                await self._each(lambda index: self._stream_one(chunks, index))
                timing = {
                    stage: round(seconds, 6)
                    for stage, seconds in self._tracks[0].stopwatch.as_dict().items()
                }
                await self._http.finish(chunks.usage(self._usage(), timing) + DONE)
        except MotetError as error:
            if not self._http.started:
                raise
            await self._http.finish(error_event(Problem.of(error)))

    async def collect(
        self,
        render: Callable[[list[Collected], Usage], bytes],
        collected: type[Collected] = Collected,
        *,
        threaded: bool = False,
    ) -> None:
        """Send the whole reply as one JSON body. threaded: render it on a thread, since it takes long."""
        choices = [collected() for _ in self._requests]
        async with self._http.while_connected():
            await self._each(lambda index: self._collect_one(choices[index], index))
            timing = (b"server-timing", server_timing(self._tracks[0].stopwatch))
            usage = self._usage()
            if threaded:
                body = await asyncio.to_thread(render, choices, usage)
            else:
                body = render(choices, usage)
            await self._http.reply(200, body, [timing])

    async def _each(self, run: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """Run all choices concurrently; the first error ends them all and is raised."""
        if len(self._requests) == 1:
            await run(0)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(self._requests)):
                    group.create_task(run(index))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _stream_one(self, chunks: Chunks, index: int) -> None:
        choice, track = chunks.choice(index), self._tracks[index]
        opening = choice.start()
        has_begun = False  # text was written

        def write_now(batch: list[Text], record: Callable[[], None]) -> bool:
            if not (has_begun and self._http.is_writable):
                return False
            data = choice.batch(batch)  # before it is recorded: an error is the task's to report
            record()
            if data:
                self._http.write_now(data)
            track.got(batch)
            return True

        outcome = self._outcomes[index]
        outcome.sink = write_now if choice.is_plain else None
        try:
            with track:
                async with aclosing(self._open(index)) as batches:
                    async for batch in self._told(batches, index):
                        track.got(batch)
                        opening += self._note_targets(index)
                        # Blocks while the client does not read: its stream then gets no more
                        # credit, and other streams are not affected.
                        if data := opening + choice.batch(batch):
                            await self._http.write(data)
                            opening, has_begun = b"", True
        finally:
            outcome.sink = None  # else the outcome would hold this object, which has the prompts
        self._http.hold(opening + choice.finish(self._end(index)))

    async def _collect_one(self, choice: Collected, index: int) -> None:
        track = self._tracks[index]
        with track:
            async with aclosing(self._open(index)) as batches:
                async for batch in batches:
                    track.got(batch)
                    self._note_targets(index)
                    choice.add(batch)
        choice.end = self._end(index)

    def _note_targets(self, index: int) -> bytes:
        """Name a target that has begun to serve: in the header, or as a comment of the stream.

        A client learns from it that a reply goes on at another engine.
        """
        comments, known = b"", self._http.targets
        new = self._outcomes[index].targets[self._named[index] :]
        self._named[index] += len(new)
        for name in new:
            if name not in known[-1:]:
                known.append(name)
                comments += b": served-by %b\n\n" % name.encode()
        return comments if self._http.started else b""

    def _told(
        self, batches: AsyncGenerator[list[Any], None], index: int
    ) -> AsyncIterator[list[Any]]:
        """Return the batches; until the first, the stream reports the loading of a model."""
        model = self._requests[index].model
        if unloaded(self._directory, "decode", model) is None:
            return batches
        return while_loading(self._http, self._directory, "decode", model, batches)

    def _open(self, index: int) -> AsyncGenerator[list[Any], None]:
        return self._source(self._requests[index], self._outcomes[index])

    def _end(self, index: int) -> End:
        end = self._outcomes[index].end
        if end is None:
            raise InternalError("a reply ended without its End frame")
        return end

    def _usage(self) -> Usage:
        return add_usage([outcome.end for outcome in self._outcomes], self._prompts)
