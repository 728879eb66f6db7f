"""Run the chat that answers a response, and put what comes back into its output."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from motet_gateway.context import GatewayContext
from motet_gateway.images.chat_generation import ChatImageGeneration
from motet_gateway.openai.chat_reply import ChatReply
from motet_gateway.tenancy.tenant import Ticket
from motet_pipelines.images.chat_drawing import Drawing
from motet_shared.errors import ContextTooLong
from motet_shared.messages import DenoisingProgress, Resume, Text

from .chat_request import ChatRequest
from .output.output import Output
from .truncation import shorter


class Reply(ChatReply):
    """Run the chat of a response.

    `shorten`: a conversation that is too long for the model loses its oldest turns.
    """

    def __init__(
        self, service: GatewayContext, asked: ChatRequest, ticket: Ticket, *, shorten: bool
    ):
        super().__init__(service, ticket)
        self._asked, self._shorten = asked, shorten

    async def attempts(self, resume: Resume | None = None) -> AsyncGenerator[list[Any], None]:
        """Yield batches of Text, or of what is drawn; `resume` says what was received before."""
        asked, dropped, started = self._asked, 0, False
        while True:
            try:
                async with aclosing(self.batches(asked, resume)) as batches:
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
