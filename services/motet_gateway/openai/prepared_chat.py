"""Prepare a chat with one reply: check its body, convert it to a request, and read its images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from motet_gateway.context import GatewayContext
from motet_gateway.images.chat_generation import ChatImageGeneration
from motet_gateway.tenancy.tenant import Tenant
from motet_pipelines.chat.models import accepts_images
from motet_pipelines.chat.vision import InputMedia
from motet_shared.messages import Chat

from .chat_images import read_images
from .param_names import ParamNames
from .prompt_size import PromptSize
from .requests import chat_requests, wire_tools
from .schema import ChatBody, check_tools


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat that can run: its request, its images, and how it is named in errors.

    sees: the model accepts images.
    """

    chat: Chat
    pictures: list[InputMedia]
    size: PromptSize
    names: ParamNames
    generation: ChatImageGeneration | None = None
    sees: bool = False

    def check_size(self) -> None:
        """Raise ContextTooLong for messages that cannot fit."""
        with self.renamed():
            self.size.check_chat(self.chat)

    @contextmanager
    def renamed(self) -> Iterator[None]:
        """Name the parameters of the client's protocol in errors of the block."""
        with self.names.applied():
            yield


async def prepare_chat(
    service: GatewayContext, tenant: Tenant, body: ChatBody, request_id: str, names: ParamNames
) -> PreparedChat:
    """Return the chat of a body that another protocol was converted to.

    `body.model` is the served model. Raises MotetError with the names of that protocol. The size
    of the messages is left to `check_size`.
    """
    directory = service.bus.directory
    with names.applied():
        size = PromptSize.of(directory, "tokenizer", body.model, tenant)
        size.check_count(len(body.messages), "messages")
        size.check_tools(wire_tools(body.tools or []))
        check_tools(body)
        sees = accepts_images(directory, body.model)
        generation = ChatImageGeneration.of(service, body, request_id)
        (request,) = chat_requests(body, request_id, tenant.rights, accepts_images=sees)
        pictures = await read_images(service, body, accepts_images=sees)
    return PreparedChat(request, pictures, size, names, generation, sees)
