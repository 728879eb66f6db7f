"""Convert a response's body and conversation to the request of a chat, which answers it.

Everything that a chat checks is checked there, once; its errors are renamed to the parameters of a
response.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from motet_gateway.context import GatewayContext
from motet_gateway.openai import schema as chat
from motet_gateway.openai.param_names import ParamNames
from motet_gateway.openai.prepared_chat import PreparedChat, prepare_chat
from motet_gateway.openai.structured import (
    AUTO_TOOL_CHOICE,
    JsonFormat,
    JsonSchema,
    ResponseFormat,
)
from motet_gateway.openai.structured import SchemaFormat as ChatSchemaFormat
from motet_gateway.tenancy.tenant import Tenant
from motet_pipelines.chat.vision import InputMedia
from motet_shared.messages import Chat

from .messages import Messages, Placed, as_messages
from .schema import LOGPROBS, ResponseBody, SchemaFormat
from .stored_files import with_stored_files
from .tools import OfferedTools, offered

_RENAMED = (
    (re.compile(r"(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"response_format\.json_schema\.schema"), "text.format.schema"),
    (re.compile(r"response_format"), "text.format"),
    (re.compile(r"max_completion_tokens"), "max_output_tokens"),
    (re.compile(r"reasoning_effort"), "reasoning.effort"),
    (re.compile(r"(image_url|video_url)\.url"), r"\1"),
    (re.compile(r"\bmessages\b"), "input"),
)

_NO_TOOLS = OfferedTools([], AUTO_TOOL_CHOICE, frozenset())


@dataclass(frozen=True, slots=True)
class ChatRequest(PreparedChat):
    """A response as a chat; `tools` is what its answer is read with."""

    tools: OfferedTools = _NO_TOOLS

    @property
    def params(self) -> tuple[str, ...]:
        """Return the path of the item that each message begins with."""
        return self.names.messages

    def with_messages(
        self, request: Chat, pictures: list[InputMedia], params: tuple[str, ...]
    ) -> ChatRequest:
        """Return the same chat with other messages."""
        return replace(self, chat=request, pictures=pictures, names=names_of(params))


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
    tools = offered(body.tools or [], body.tool_choice)
    placed = await with_stored_files(
        conversation, service.files, tenant.owner, service.config.max_body
    )
    messages = await as_messages(placed, body.instructions)
    asked = _chat_body(body, messages, tools, seed)
    names = names_of(tuple(messages.params))
    made = await prepare_chat(service, tenant, asked, request_id, names)
    return ChatRequest(
        made.chat, made.pictures, made.size, names, made.generation, made.sees, tools
    )


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
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        logit_bias=body.logit_bias,
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


def names_of(params: tuple[str, ...]) -> ParamNames:
    """Return the names of a response's parameters; `params`: the path of each message's item."""
    return ParamNames(messages=params, whole="input", patterns=_RENAMED)
