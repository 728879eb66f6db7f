"""Describe the answers of /v1/responses as structs, for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from .answers import Count, Unix


class ResponseError(Struct):
    code: str
    message: str
    param: str | None
    type: str


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class InputTokensDetails(Struct):
    cached_tokens: Count
    cache_write_tokens: Count


class OutputTokensDetails(Struct):
    reasoning_tokens: Count


class ResponseUsage(Struct):
    input_tokens: Count
    input_tokens_details: InputTokensDetails
    output_tokens: Count
    output_tokens_details: OutputTokensDetails
    total_tokens: Count


class Response(Struct):
    """A response; `output` has messages, reasoning, tool calls and images, each with an id.

    What the client sent is repeated.
    """

    id: Annotated[str, Meta(pattern="^resp_[0-9a-f]{48}$")]
    object: Literal["response"]
    created_at: Unix
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    completed_at: Unix | None
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    service_tier: str
    store: bool
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    temperature: float
    top_p: float
    top_logprobs: Count
    presence_penalty: float
    frequency_penalty: float
    reasoning: dict[str, Any]
    text: dict[str, Any]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None


class DeletedResponse(Struct):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class DeletedResponses(Struct):
    object: Literal["list"]
    deleted: Literal[True]


class InputItems(Struct):
    """A page of the input items of a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
