"""Define the bodies of `/api/…`; `name` is the older name of `model`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from motet_gateway.http.decoding import Decoder
from motet_gateway.http.fields import Count, Positive, Strict, ToolName

from .options import Options

ModelName = Annotated[str, Meta(min_length=1)]
Effort = Literal["low", "medium", "high"]
Base64 = str


class Function(Strict):
    name: str
    arguments: dict[str, Any]
    index: Count | None = None
    description: str | None = None


class ToolCall(Strict):
    function: Function
    id: str | None = None
    type: Literal["function"] | None = None


class Message(Strict):
    """A message. tool_name, tool_call_id: the call that a message of the role `tool` answers."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Base64] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Declaration(Strict):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Strict):
    function: Declaration
    type: Literal["function"] = "function"


class ReplyFields(Strict):
    """Fields that chats and generations share.

    format: "json", or a JSON schema that the reply is held to. think: whether the model reasons
    first, or how much.
    """

    model: ModelName
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    keep_alive: float | str | None = None
    think: bool | Effort | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class OllamaChatBody(ReplyFields, kw_only=True):
    """Body of POST /api/chat; without messages the model is loaded, or unloaded."""

    messages: list[Message] | None = None
    tools: list[Tool] | None = None


class GenerateBody(ReplyFields, kw_only=True):
    """Body of POST /api/generate; without a prompt the model is loaded, or unloaded.

    raw: the prompt is the model's input as it is. suffix: text behind the gap to be filled.
    template, context: only empty.
    """

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    images: list[Base64] | None = None
    raw: bool | None = None
    template: str | None = None
    context: list[Count] | None = None


class EmbedBody(Strict):
    """Body of POST /api/embed."""

    model: ModelName
    input: str | list[str]
    dimensions: Positive | None = None
    keep_alive: float | str | None = None
    options: Options | None = None


class EmbeddingsPromptBody(Strict):
    """Body of POST /api/embeddings, the older form of /api/embed."""

    model: ModelName
    prompt: str
    keep_alive: float | str | None = None
    options: Options | None = None


class ShowBody(Strict):
    """Body of POST /api/show."""

    model: ModelName | None = None
    name: ModelName | None = None
    verbose: Any = None


class PullBody(Strict):
    """Body of POST /api/pull: a name on the hub, as `motet pull` takes it."""

    model: ModelName | None = None
    name: ModelName | None = None
    insecure: Literal[False] | None = None
    stream: bool | None = None


parse_chat = Decoder(OllamaChatBody).decode
parse_generate = Decoder(GenerateBody).decode
parse_embed = Decoder(EmbedBody).decode
parse_prompt = Decoder(EmbeddingsPromptBody).decode
parse_show = Decoder(ShowBody).decode
parse_pull = Decoder(PullBody).decode
