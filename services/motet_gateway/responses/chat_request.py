"""Convert a response's body and conversation to the request of a chat, which answers it.

Everything that a chat checks is checked there, once; its errors are renamed to the parameters of a
response.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from motet_gateway.context import GatewayContext
from motet_gateway.images.chat_generation import ChatImageGeneration
from motet_gateway.openai import schema as chat
from motet_gateway.openai.chat_images import read_images
from motet_gateway.openai.prompt_size import PromptSize
from motet_gateway.openai.requests import chat_requests, wire_tools
from motet_gateway.openai.structured import JsonFormat, JsonSchema, ResponseFormat
from motet_gateway.openai.structured import SchemaFormat as ChatSchemaFormat
from motet_gateway.tenancy.tenant import Tenant
from motet_pipelines.chat.models import accepts_images
from motet_pipelines.chat.vision import InputMedia
from motet_shared.errors import MotetError
from motet_shared.messages import Chat

from .messages import Messages, Placed, as_messages
from .schema import LOGPROBS, ResponseBody, SchemaFormat
from .tools import OfferedTools, offered

_QUOTED = re.compile(r"`[^`]*`")  # a parameter within a message
_MESSAGE = re.compile(r"messages\[(\d+)\]")
_RENAMED = (
    (re.compile(r"(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"response_format\.json_schema\.schema"), "text.format.schema"),
    (re.compile(r"response_format"), "text.format"),
    (re.compile(r"max_completion_tokens"), "max_output_tokens"),
    (re.compile(r"reasoning_effort"), "reasoning.effort"),
    (re.compile(r"(image_url|video_url)\.url"), r"\1"),
    (re.compile(r"\bmessages\b"), "input"),
)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A response as a chat: the request, its pictures, and what its answer is read with.

    `params`: the path of the item that each message begins with.
    """

    chat: Chat
    pictures: list[InputMedia]
    tools: OfferedTools
    params: tuple[str, ...]
    size: PromptSize
    generation: ChatImageGeneration | None = None
    sees: bool = False

    def check_size(self) -> None:
        """Raise ContextTooLong for messages that cannot fit."""
        with self.renamed():
            self.size.check_chat(self.chat)

    @contextmanager
    def renamed(self) -> Iterator[None]:
        """Name the parameters of the response in errors of the chat."""
        with renamed(self.params):
            yield

    def with_messages(
        self, request: Chat, pictures: list[InputMedia], params: tuple[str, ...]
    ) -> ChatRequest:
        """Return the same chat with other messages."""
        return replace(self, chat=request, pictures=pictures, params=params)


async def chat_request(
    service: GatewayContext,
    tenant: Tenant,
    body: ResponseBody,
    conversation: Sequence[Placed],
    request_id: str,
    seed: int | None = None,
) -> ChatRequest:
    """Return the chat that answers `conversation`. `body.model` is the served model.

    Raises MotetError that names a parameter of the response.
    """
    directory = service.bus.directory
    tools = offered(body.tools or [], body.tool_choice)
    messages = await as_messages(conversation, body.instructions)
    params = tuple(messages.params)
    with renamed(params):
        size = PromptSize.of(directory, "tokenizer", body.model, tenant)
        size.check_count(len(messages.messages), "messages")
        size.check_tools(wire_tools(tools.tools))
        asked = _chat_body(body, messages, tools, seed)
        chat.check_tools(asked)
        sees = accepts_images(directory, body.model)
        generation = ChatImageGeneration.of(service, asked, request_id)
        (request,) = chat_requests(asked, request_id, tenant.rights, accepts_images=sees)
        pictures = await read_images(service, asked, accepts_images=sees)
    return ChatRequest(request, pictures, tools, params, size, generation, sees)


def _chat_body(
    body: ResponseBody, messages: Messages, tools: OfferedTools, seed: int | None
) -> chat.ChatBody:
    logprobs = LOGPROBS in body.included
    return chat.ChatBody(
        model=body.model,
        messages=messages.messages,
        tools=tools.tools or None,
        tool_choice=_choice(tools),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body),
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        max_completion_tokens=body.max_output_tokens,
        logprobs=logprobs,
        top_logprobs=body.top_logprobs if logprobs else None,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed if seed is None else seed,
        service_tier=body.service_tier,
        user=body.user,
        safety_identifier=body.safety_identifier,
    )


def _choice(tools: OfferedTools) -> object:
    choice = tools.choice
    return {"type": "function", "name": choice.tool} if choice.tool else choice.kind


def _response_format(body: ResponseBody) -> ResponseFormat | None:
    given = body.text.format if body.text is not None else None
    if isinstance(given, SchemaFormat):
        schema = JsonSchema(name=given.name, schema=given.schema, strict=given.strict)
        return ChatSchemaFormat(json_schema=schema)
    return given if isinstance(given, JsonFormat) else None


# --------------------------------------------------------------------------------------- parameters
@contextmanager
def renamed(params: Sequence[str]) -> Iterator[None]:
    """Replace the parameters of a chat by those of the response in errors of the block."""
    try:
        yield
    except MotetError as error:
        if error.param is not None:
            error.param = rename(error.param, params)
        error.message = _QUOTED.sub(lambda found: rename(found[0], params), error.message)
        raise


def rename(text: str, params: Sequence[str]) -> str:
    """Return a path of a chat's body in the response's terms."""

    def item(found: re.Match[str]) -> str:
        index = int(found[1])
        return params[index] if index < len(params) else "input"

    text = _MESSAGE.sub(item, text)
    for pattern, name in _RENAMED:
        text = pattern.sub(name, text)
    return text
