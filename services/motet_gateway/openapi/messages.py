"""Describe the answers of /v1/messages as structs, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from .answers import Count


class MessageUsage(Struct):
    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count


class MessageReply(Struct):
    """A message; `content` has blocks of the types thinking, text and tool_use."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class MessageTokensCount(Struct):
    input_tokens: Count


class MessagesModel(Struct):
    """A chat model; `created_at` is the epoch if it is not known."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: Count | None
    max_tokens: Count | None
    capabilities: None
    line: None
    deprecated_at: None
    retires_at: None


class MessagesModels(Struct):
    data: list[MessagesModel]
    has_more: bool
    first_id: str | None
    last_id: str | None
