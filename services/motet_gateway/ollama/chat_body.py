"""Convert `/api/chat` and `/api/generate` to the body of a chat, or of a raw completion."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Literal

import msgspec

from motet_gateway.openai import schema as chat
from motet_gateway.openai.param_names import ParamNames
from motet_gateway.openai.structured import JsonFormat, JsonSchema, ResponseFormat, SchemaFormat
from motet_shared.errors import BadRequest, UnsupportedParameter
from motet_shared.messages import ModelCard

from .options import apply_options
from .schema import GenerateBody, Message, OllamaChatBody, ReplyFields

Effort = Literal["none", "low", "medium", "high"]
_PATTERNS = (
    (re.compile(r"\.image_url(\.url)?"), ""),
    (re.compile(r"response_format(\.json_schema\.schema)?"), "format"),
    (re.compile(r"^reasoning_effort$"), "think"),
    (re.compile(r"^max_tokens$"), "options.num_predict"),
)
_OF_GENERATE = (
    (re.compile(r"^messages\b.*"), "prompt"),
    *_PATTERNS,
)


def chat_body(body: OllamaChatBody, card: ModelCard | None) -> tuple[chat.ChatBody, ParamNames]:
    """Return the chat of a body. Raises BadRequest or UnsupportedParameter, by its parameters.

    card: of the model, which says whether it reasons, and whether that can be switched.
    """
    made = _Messages()
    for index, message in enumerate(body.messages or []):
        made.add(message, f"messages[{index}]")
    given = chat.ChatBody(model=body.model, messages=made.messages)
    if body.tools:
        given.tools = [
            chat.FunctionTool(
                function=chat.Function(
                    name=tool.function.name,
                    description=tool.function.description,
                    parameters=tool.function.parameters,
                )
            )
            for tool in body.tools
        ]
    _set_common(given, body)
    _set_of_chat(given, body, card)
    return given, ParamNames(tuple(made.params), made.parts, "messages", _PATTERNS)


def generate_body(body: GenerateBody, card: ModelCard | None) -> tuple[chat.ChatBody, ParamNames]:
    """Return the chat of a generation: `system`, and a message of the user."""
    made = _Messages()
    if body.system:
        made.messages.append(chat.SystemMessage(content=body.system))
    parts = {
        (len(made.messages), index): f"images[{index}]" for index in range(len(body.images or []))
    }
    made.messages.append(chat.UserMessage(content=_content(body.prompt or "", body.images)))
    given = chat.ChatBody(model=body.model, messages=made.messages)
    _set_common(given, body)
    _set_of_chat(given, body, card)
    return given, ParamNames((), parts, "prompt", _OF_GENERATE)


def completion_body(body: GenerateBody) -> tuple[chat.CompletionBody, ParamNames]:
    """Return the completion of a raw prompt, or of one with a suffix.

    Raises UnsupportedParameter for what needs a chat template.
    """
    reason = "raw" if body.raw else "suffix"
    for name in ("system", "images", "think"):
        if getattr(body, name):
            message = f"`{name}` is not supported together with `{reason}`; leave it out"
            raise UnsupportedParameter(message, param=name)
    given = chat.CompletionBody(model=body.model, prompt=body.prompt or "", suffix=body.suffix)
    _set_common(given, body)
    if body.logprobs:
        given.logprobs = body.top_logprobs or 0
    return given, ParamNames((), {}, "prompt", _PATTERNS)


def check_generate(body: GenerateBody) -> None:
    """Raise UnsupportedParameter for parameters that only other servers have."""
    for name, remedy in (
        ("template", "the model's own template is used"),
        ("context", "send the conversation to /api/chat"),
    ):
        if getattr(body, name):
            raise UnsupportedParameter(f"`{name}` is not supported: {remedy}", param=name)


def _set_common(given: chat.SamplingFields, body: ReplyFields) -> None:
    """Set sampling and format. Raises BadRequest for `top_logprobs` without `logprobs`."""
    apply_options(given, body.options)
    given.response_format = _format(body.format)
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("`top_logprobs` needs `logprobs: true`", param="top_logprobs")


def _set_of_chat(given: chat.ChatBody, body: ReplyFields, card: ModelCard | None) -> None:
    given.reasoning_effort = _effort(body, card)
    given.logprobs, given.top_logprobs = body.logprobs, body.top_logprobs


def _format(wanted: str | dict[str, object] | None) -> ResponseFormat | None:
    if isinstance(wanted, dict):
        return SchemaFormat(json_schema=JsonSchema(name="format", schema=wanted))
    return JsonFormat() if wanted == "json" else None


def _effort(body: ReplyFields, card: ModelCard | None) -> Effort | None:
    """Return the reasoning effort; None where nothing is asked for, or nothing can be switched.

    Raises UnsupportedParameter if a model is to reason that does not.
    """
    if body.think is None or card is None:
        return None
    if body.think and not card.reasoning:
        message = f"`think`: model {body.model!r} does not reason; leave it out or send false"
        raise UnsupportedParameter(message, param="think")
    if isinstance(body.think, str):
        return body.think
    if not card.reasoning_switch:
        return None
    return "medium" if body.think else "none"


# --------------------------------------------------------------------------------------- messages
class _Messages:
    """The messages of a chat with the path of each and of each part.

    Calls of tools without an id are given one. The result of a tool names its call by
    `tool_call_id`, else by `tool_name`, else it is that of the first call without a result.
    """

    def __init__(self) -> None:
        self.messages: list[chat.Message] = []
        self.params: list[str] = []
        self.parts: dict[tuple[int, int], str] = {}
        self._open: set[str] = set()  # ids of calls without a result
        # Their ids in order, under "" and under the name of each tool; and of some with a result.
        self._waiting: dict[str, deque[str]] = defaultdict(deque)

    def add(self, message: Message, param: str) -> None:
        """Append a message. Raises BadRequest for what its role does not have."""
        self._check(message, param)
        for index in range(len(message.images or [])):
            self.parts[len(self.messages), index] = f"{param}.images[{index}]"
        self.messages.append(self._converted(message, param))
        self.params.append(param)

    def _check(self, message: Message, param: str) -> None:
        for name, role in (
            ("images", "user"),
            ("tool_calls", "assistant"),
            ("thinking", "assistant"),
        ):
            if getattr(message, name) and message.role != role:
                where = f"{param}.{name}"
                text = f"`{where}` is taken in messages of the role {role} only; move it there"
                raise UnsupportedParameter(text, param=where)

    def _converted(self, message: Message, param: str) -> chat.Message:
        content = message.content or ""
        match message.role:
            case "system":
                return chat.SystemMessage(content=content)
            case "user":
                return chat.UserMessage(content=_content(content, message.images))
            case "tool":
                return chat.ToolMessage(
                    content=content, tool_call_id=self._answered(message, param)
                )
            case "assistant":
                return chat.AssistantMessage(
                    content=content,
                    reasoning_content=message.thinking or None,
                    tool_calls=self._calls(message) or None,
                )

    def _calls(self, message: Message) -> list[chat.ToolCall]:
        calls = []
        for index, call in enumerate(message.tool_calls or []):
            name = call.function.name
            found = call.id or f"call_{len(self.messages)}_{index}"
            self._open.add(found)
            for key in ("", name):
                self._waiting[key].append(found)
            arguments = msgspec.json.encode(call.function.arguments).decode()
            function = chat.FunctionCall(name=name, arguments=arguments)
            calls.append(chat.ToolCall(id=found, type="function", function=function))
        return calls

    def _answered(self, message: Message, param: str) -> str:
        """Return the id of the call that a result belongs to. Raises BadRequest for none."""
        name, given = message.tool_name, message.tool_call_id
        fit = given or self._first(name or "")
        if fit not in self._open:
            where = f"{param}.{'tool_call_id' if given else 'tool_name'}"
            text = f"`{where}`: no call without a result before it fits; send `tool_calls` first"
            raise BadRequest(text, param=where)
        self._open.remove(fit)
        return fit

    def _first(self, name: str) -> str:
        """Return the id of the first call of a tool without a result, of any for ""; "" for none."""
        waiting = self._waiting[name]
        while waiting and waiting[0] not in self._open:
            waiting.popleft()
        return waiting[0] if waiting else ""


def _content(text: str, images: Sequence[str] | None) -> str | list[chat.Part]:
    """Return the content of a message: its images, as Ollama orders them, then its text."""
    if not images:
        return text
    parts: list[chat.Part] = [
        chat.ImagePart(image_url=chat.ImageUrl(url=f"data:image/*;base64,{image}"))
        for image in images
    ]
    return [*parts, chat.TextPart(text=text)] if text else parts
