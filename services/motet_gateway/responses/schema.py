"""Define the body of POST /v1/responses as structs that reject everything else."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from motet_gateway.http.decoding import Decoder
from motet_gateway.http.fields import Count, Int64, Metadata, Name, Penalty, Positive, Ratio, Strict
from motet_gateway.openai.hints import Ignored
from motet_gateway.openai.schema import MAX_STOP_IDS, Bias, check_stops
from motet_gateway.openai.structured import JsonFormat, TextFormat
from motet_shared.errors import BadRequest, UnsupportedParameter

from .items import Item
from .refusals import as_refusal
from .tools import Choice, Declaration

LOGPROBS = "message.output_text.logprobs"
IMAGE_URLS = "message.input_image.image_url"
ENCRYPTED = "reasoning.encrypted_content"
Includable = Literal[
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
]


class SchemaFormat(Strict, tag="json_schema"):
    """A JSON schema; the text is always held to all of it, with or without `strict`."""

    name: Name
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextOptions(Strict):
    format: TextFormat | JsonFormat | SchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Strict):
    """Hold how much the model reasons; summaries are not made: the reasoning itself is returned."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(Strict):
    include_obfuscation: Literal[False] | None = None


class ResponseBody(Strict):
    """Body of POST /v1/responses.

    `seed`, `stop`, `logit_bias` and the penalties of OpenAI's chats are extensions, and so are
    those that /v1/completions shares with other servers of open models, which benchmarks send.
    """

    model: str
    input: str | list[Item] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[Includable] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    tools: list[Declaration] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Positive | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Ratio | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Int64 | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    min_p: Ratio | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[Count], Meta(max_length=MAX_STOP_IDS)] | None = None
    logit_bias: dict[Count, Bias] | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    # They cannot change the answer, which repeats them.
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Only null: what they name is not kept here.
    conversation: None = None
    prompt: None = None
    context_management: None = None
    moderation: None = None

    @property
    def included(self) -> frozenset[str]:
        """Return what the response should hold besides."""
        return frozenset(self.include or ())


_decoder = Decoder(ResponseBody)
_UNTYPED = re.compile(r"input(\[\d+\](\.type)?)?")


def parse_response(data: bytes, ignored: Ignored | None = None) -> ResponseBody:
    """Validate a body; without `ignored`, hints are refused.

    Raises BadRequest or UnsupportedParameter, which name the parameter.
    """
    try:
        body = _decoder.decode(data, ignored)
    except BadRequest as error:
        typed = _with_types(data) if _UNTYPED.fullmatch(error.param or "") else None
        if typed is None:
            raise as_refusal(error, data) from None
        if ignored is not None:
            ignored.paths.clear()
        try:
            body = _decoder.decode(typed, ignored)
        except BadRequest as second:
            raise as_refusal(second, data) from None
    _check(body)
    return body


def _with_types(data: bytes) -> bytes | None:
    """Return the body with the type of messages that have none; None if all items have one."""
    body = msgspec.json.decode(data)
    items = body.get("input") if isinstance(body, dict) else None
    untyped = [
        item
        for item in (items if isinstance(items, list) else ())
        if isinstance(item, dict) and "type" not in item and "role" in item
    ]
    for item in untyped:
        item["type"] = "message"
    return msgspec.json.encode(body) if untyped else None


def _check(body: ResponseBody) -> None:
    if not body.input and body.previous_response_id is None:
        raise BadRequest("`input` is required unless there is a previous response", param="input")
    if body.stream_options is not None and not body.stream:
        raise BadRequest("`stream_options` needs `stream: true`", param="stream_options")
    if body.top_logprobs is not None and LOGPROBS not in body.included:
        message = f"`top_logprobs` needs {LOGPROBS!r} in `include`"
        raise BadRequest(message, param="top_logprobs")
    check_stops([body.stop] if isinstance(body.stop, str) else body.stop or [])
    if body.background and body.store is False:
        message = "`background` needs the response to be stored; leave `store` out"
        raise BadRequest(message, param="store")
    for name in ("max_tool_calls", "background"):
        if getattr(body, name) and _draws(body):
            message = f"`{name}` is not supported together with `image_generation`; leave it out"
            raise UnsupportedParameter(message, param=name)


def _draws(body: ResponseBody) -> bool:
    return any(tool.__struct_config__.tag == "image_generation" for tool in body.tools or ())
