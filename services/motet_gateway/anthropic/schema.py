"""Define the bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from motet_gateway.http.decoding import Decoder
from motet_gateway.http.fields import Count, Positive, Ratio, Strict, ToolName


class TextBlock(Strict, tag="text"):
    text: str


class Base64Source(Strict, tag="base64"):
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(Strict, tag="url"):
    url: str


class ImageBlock(Strict, tag="image"):
    source: Base64Source | UrlSource


class ThinkingBlock(Strict, tag="thinking"):
    """Reasoning of an earlier reply; `signature` is accepted as it was returned, unverified."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Strict, tag="redacted_thinking"):
    """Reasoning that another server has encrypted; it is left out of the prompt."""

    data: str


class PlainTextSource(Strict, tag="text"):
    media_type: Literal["text/plain"]
    data: str


class DocumentBlock(Strict, tag="document"):
    """A text file; other kinds are not read."""

    source: PlainTextSource
    title: str | None = None


class ToolUseBlock(Strict, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Strict, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None


Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
)


class Message(Strict):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class Tool(Strict):
    """A tool that the client runs; other types are hosted elsewhere and refused."""

    name: ToolName
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None


class AutoChoice(Strict, tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Strict, tag="any"):
    disable_parallel_tool_use: bool | None = None


class NamedChoice(Strict, tag="tool"):
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Strict, tag="none"):
    pass


class ThinkingEnabled(Strict, tag="enabled"):
    budget_tokens: Positive


class ThinkingAdaptive(Strict, tag="adaptive"):
    pass


class ThinkingDisabled(Strict, tag="disabled"):
    pass


class JsonOutput(Strict, tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


class PromptFields(Strict):
    """Fields of which the prompt is made."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoChoice | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None


class MessagesBody(PromptFields, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: Positive
    stream: bool | None = None
    temperature: Ratio | None = None
    top_p: Ratio | None = None
    top_k: Count | None = None
    stop_sequences: list[str] | None = None


parse_messages = Decoder(MessagesBody).decode
parse_count = Decoder(PromptFields).decode
