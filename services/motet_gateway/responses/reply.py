"""Run the chat that answers a response, and put what comes back into its output."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec

from motet_gateway.context import GatewayContext
from motet_gateway.images.chat_generation import ChatImageGeneration, chat_with_images
from motet_gateway.openai.chat_images import leased_images
from motet_gateway.operations.metrics import Track
from motet_gateway.tenancy.tenant import Ticket
from motet_gateway.tenancy.usage import ReplyMeter, prompt_tokens
from motet_pipelines.chat.chat import Outcome, chat
from motet_pipelines.images.chat_drawing import Drawing
from motet_shared.errors import ContextTooLong, InternalError
from motet_shared.messages import Chat, DenoisingProgress, End, Resume, Text

from .chat_request import ChatRequest
from .output.output import Output
from .truncation import shorter


class Reply:
    """Run one chat. `end` and `stopwatch` are complete once `batches` has ended.

    `shorten`: a conversation that is too long for the model loses its oldest turns.
    """

    def __init__(
        self, service: GatewayContext, asked: ChatRequest, ticket: Ticket, *, shorten: bool
    ):
        self._service, self._asked, self._ticket = service, asked, ticket
        self._shorten = shorten
        self.outcome = Outcome()
        self.track: Track | None = None

    @property
    def end(self) -> End:
        if self.outcome.end is None:
            raise InternalError("a reply ended without its End frame")
        return self.outcome.end

    async def batches(self, resume: Resume | None = None) -> AsyncGenerator[list[Any], None]:
        """Yield batches of Text, or of what is drawn; `resume` says what was received before."""
        asked, dropped, started = self._asked, 0, False
        while True:
            try:
                asked.check_size()
                with asked.renamed():
                    async with aclosing(self._attempt(asked, resume)) as batches:
                        async for batch in batches:
                            started = True
                            yield batch
                return
            except ContextTooLong:
                dropped = dropped * 2 or 1
                shortened = shorter(self._asked, dropped)
                if started or not self._shorten or shortened is None:
                    raise
                if len(shortened.chat.messages) == len(asked.chat.messages):
                    raise  # no more can be left out
                asked = shortened

    async def _attempt(
        self, asked: ChatRequest, resume: Resume | None
    ) -> AsyncGenerator[list[Any], None]:
        meter = ReplyMeter(self._ticket, prompt_tokens(asked.chat))
        self.track = self._service.metrics.begin(asked.chat.model, self.outcome, meter)
        async with self._source(asked, resume) as batches:
            with self.track as track:
                async with aclosing(batches):
                    async for batch in batches:
                        track.got(batch)
                        yield batch

    @asynccontextmanager
    async def _source(
        self, asked: ChatRequest, resume: Resume | None
    ) -> AsyncIterator[AsyncGenerator[list[Any], None]]:
        """Open the pipeline: a chat, or one in which pictures are drawn."""
        service, config = self._service, self._service.config
        if asked.generation is not None:
            store = await service.uploads()
            yield chat_with_images(
                service,
                store,
                asked.generation,
                asked.pictures,
                asked.sees,
                asked.chat,
                self.outcome,
            )
            return
        async with await leased_images(service, asked.pictures) as images:
            request: Chat = msgspec.structs.replace(asked.chat, images=images, resume=resume)
            yield chat(
                service.bus,
                request,
                self.outcome,
                deadline=config.request_timeout,
                patience=config.patience,
            )


def receive(output: Output, batch: Sequence[Any], generation: ChatImageGeneration | None) -> None:
    """Add a batch of a reply to the output of a response."""
    for item in batch:
        if isinstance(item, Text):
            output.add((item,))
        elif isinstance(item, Drawing):
            _add_drawing(output, item, generation)
        elif isinstance(item, DenoisingProgress) and item.preview:
            output.image.preview({"partial_image_b64": base64.b64encode(item.preview).decode()})


def _add_drawing(output: Output, drawing: Drawing, generation: ChatImageGeneration | None) -> None:
    kind = generation.request.format if generation is not None else "png"
    output.image.fields.update(
        result=base64.b64encode(drawing.data).decode(),
        revised_prompt=drawing.prompt,
        output_format=kind,
        size=f"{drawing.width}x{drawing.height}",
        background="opaque",
        action="generate",
    )
    output.finish()
