"""Run a prepared chat: open its pipeline, and measure and charge what comes back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec

from motet_gateway.context import GatewayContext
from motet_gateway.images.chat_generation import chat_with_images
from motet_gateway.operations.metrics import Track
from motet_gateway.tenancy.tenant import Ticket
from motet_gateway.tenancy.usage import ReplyMeter, prompt_tokens
from motet_pipelines.chat.chat import Outcome, chat
from motet_shared.errors import InternalError
from motet_shared.messages import Chat, End, Resume

from .chat_images import leased_images
from .prepared_chat import PreparedChat


class ChatReply:
    """Run one chat. `end` and `track` are complete once `batches` has ended."""

    def __init__(self, service: GatewayContext, ticket: Ticket):
        self._service, self._ticket = service, ticket
        self.outcome = Outcome()
        self.track: Track | None = None

    @property
    def end(self) -> End:
        """Return the end of the reply. Raises InternalError before it."""
        if self.outcome.end is None:
            raise InternalError("a reply ended without its End frame")
        return self.outcome.end

    async def batches(
        self, asked: PreparedChat, resume: Resume | None = None
    ) -> AsyncGenerator[list[Any], None]:
        """Yield batches of Text, or of what is drawn; `resume` says what was received before.

        Raises MotetError with the parameters of the client's protocol.
        """
        asked.check_size()
        meter = ReplyMeter(self._ticket, prompt_tokens(asked.chat))
        self.track = self._service.metrics.begin(asked.chat.model, self.outcome, meter)
        with asked.renamed():
            async with self._source(asked, resume) as batches:
                with self.track as track:
                    async with aclosing(batches):
                        async for batch in batches:
                            track.got(batch)
                            yield batch

    @asynccontextmanager
    async def _source(
        self, asked: PreparedChat, resume: Resume | None
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
