"""Convert Messages to the body of a chat, and remember which path each part was made of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from motet_gateway.openai import schema as chat
from motet_gateway.openai.param_names import ParamNames
from motet_gateway.openai.schema import check_stops
from motet_gateway.openai.structured import JsonSchema, SchemaFormat
from motet_shared.errors import BadRequest, UnsupportedParameter
from motet_shared.messages import ModelCard

from . import schema
from .schema import MessagesBody, PromptFields

Effort = Literal["none", "low", "medium", "high", "xhigh"]
MAX_STOPS = 64
_PATTERNS = (
    (re.compile(r"image_url(\.url)?"), "source"),
    (re.compile(r"(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"response_format\.json_schema\.schema"), "output_config.format.schema"),
    (re.compile(r"^stop\b"), "stop_sequences"),
    (re.compile(r"^reasoning_effort$"), "thinking"),
)


class ChatMessages:
    """The messages of a chat with the path of each and of each part."""

    def __init__(self) -> None:
        self.messages: list[chat.Message] = []
        self._params: list[str] = []
        self._parts: dict[tuple[int, int], str] = {}

    @property
    def names(self) -> ParamNames:
        """Return how parameters of the chat are named in errors."""
        return ParamNames(tuple(self._params), self._parts, "messages", _PATTERNS)

    def check_results(self) -> None:
        """Raise BadRequest for the result of a tool call that is not in a message before it."""
        calls: set[str] = set()
        for message, param in zip(self.messages, self._params, strict=True):
            match message:
                case chat.AssistantMessage():
                    calls |= {call.id for call in message.tool_calls or ()}
                case chat.ToolMessage() if message.tool_call_id not in calls:
                    where = f"{param}.tool_use_id"
                    shown = message.tool_call_id[:80]
                    raise BadRequest(f"`{where}`: there is no call {shown!r} before", param=where)

    def add(self, message: chat.Message, param: str, parts: Sequence[str] = ()) -> None:
        """Append a message; `parts` are the paths of its content's parts."""
        for index, part in enumerate(parts):
            self._parts[len(self.messages), index] = part
        self.messages.append(message)
        self._params.append(param)


def chat_body(body: PromptFields, card: ModelCard | None) -> tuple[chat.ChatBody, ParamNames]:
    """Return the chat of a body. Raises BadRequest or UnsupportedParameter, by its parameters.

    card: of the model, which says whether its reasoning can be switched.
    """
    made = ChatMessages()
    if body.system:
        made.add(chat.SystemMessage(content=_system(body.system)), "system")
    for index, message in enumerate(body.messages):
        _add(made, message, f"messages[{index}]")
    made.check_results()
    given = chat.ChatBody(model=body.model, messages=made.messages)
    _set_tools(given, body)
    given.reasoning_effort = _effort(body, card)
    if body.output_config is not None and body.output_config.format is not None:
        wanted = JsonSchema(name="output", schema=body.output_config.format.schema)
        given.response_format = SchemaFormat(json_schema=wanted)
    if body.messages[-1].role == "assistant":
        _continue(given, len(body.messages) - 1)
    if isinstance(body, MessagesBody):
        check_stops(body.stop_sequences or [], MAX_STOPS, "stop_sequences")
        given.max_tokens, given.stop = body.max_tokens, body.stop_sequences
        given.temperature, given.top_p, given.top_k = body.temperature, body.top_p, body.top_k
    return given, made.names


def _system(given: str | list[schema.TextBlock]) -> str:
    return given if isinstance(given, str) else "\n\n".join([block.text for block in given])


def _continue(given: chat.ChatBody, index: int) -> None:
    """Let the reply continue the last message, which is the assistant's."""
    last = given.messages[-1]
    if isinstance(last, chat.AssistantMessage) and last.tool_calls:
        param = f"messages[{index}].content"
        message = f"`{param}`: its tool calls have no results; add a message with `tool_result`"
        raise BadRequest(message, param=param)
    given.add_generation_prompt, given.continue_final_message = False, True


def _effort(body: PromptFields, card: ModelCard | None) -> Effort | None:
    """Return the reasoning effort; None where nothing is asked for, or the model does not reason."""
    if card is None or not (card.reasoning or card.reasoning_switch):
        return None
    if isinstance(body.thinking, schema.ThinkingDisabled):
        return "none" if card.reasoning_switch else None
    wanted = body.output_config.effort if body.output_config is not None else None
    if wanted == "xhigh" or wanted == "max":  # narrows the type
        return "xhigh" if card.reasoning_switch else "high"
    if wanted is not None:
        return wanted
    return "medium" if body.thinking is not None and card.reasoning_switch else None


def _set_tools(given: chat.ChatBody, body: PromptFields) -> None:
    choice = body.tool_choice
    if body.tools:
        given.tools = [
            chat.FunctionTool(
                function=chat.Function(
                    name=tool.name,
                    description=tool.description,
                    parameters=tool.input_schema,
                    strict=tool.strict,
                )
            )
            for tool in body.tools
        ]
    match choice:
        case schema.NamedChoice():
            given.tool_choice = {"type": "function", "function": {"name": choice.name}}
        case schema.AnyChoice():
            given.tool_choice = "required"
        case schema.NoChoice():
            given.tool_choice = "none"
        case _:
            pass
    if getattr(choice, "disable_parallel_tool_use", None):
        given.parallel_tool_calls = False


# --------------------------------------------------------------------------------------- messages
def _add(made: ChatMessages, message: schema.Message, param: str) -> None:
    content = message.content
    blocks = [schema.TextBlock(text=content)] if isinstance(content, str) else content
    if message.role == "assistant":
        made.add(_assistant(blocks, param), param)
    else:
        _add_user(made, blocks, param)


def _assistant(blocks: Sequence[schema.Block], param: str) -> chat.AssistantMessage:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        match block:
            case schema.TextBlock():
                texts.append(block.text)
            case schema.ThinkingBlock():
                thoughts.append(block.thinking)
            case schema.RedactedThinkingBlock():
                pass
            case schema.ToolUseBlock():
                arguments = msgspec.json.encode(block.input).decode()
                function = chat.FunctionCall(name=block.name, arguments=arguments)
                calls.append(chat.ToolCall(id=block.id, type="function", function=function))
            case _:
                raise _misplaced(block, f"{param}.content[{index}]", "user")
    return chat.AssistantMessage(
        content="".join(texts),
        reasoning_content="".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _add_user(made: ChatMessages, blocks: Sequence[schema.Block], param: str) -> None:
    """Add the results of tools, each as a message, then the rest, with pictures of the results."""
    parts: list[chat.Part] = []
    paths: list[str] = []
    for index, block in enumerate(blocks):
        where = f"{param}.content[{index}]"
        match block:
            case schema.TextBlock() | schema.ImageBlock() | schema.DocumentBlock():
                parts.append(_part(block))
                paths.append(where)
            case schema.ToolResultBlock():
                inner = block.content if isinstance(block.content, list) else []
                images = [
                    (item, f"{where}.content[{place}]")
                    for place, item in enumerate(inner)
                    if isinstance(item, schema.ImageBlock)
                ]
                parts += [_part(image) for image, _ in images]
                paths += [path for _, path in images]
                result = chat.ToolMessage(content=_result(block), tool_call_id=block.tool_use_id)
                made.add(result, where)
            case _:
                raise _misplaced(block, where, "assistant")
    if parts:
        made.add(chat.UserMessage(content=parts), param, paths)
    elif not blocks:
        where = f"{param}.content"
        raise BadRequest(f"`{where}` is empty; send at least one block", param=where)


def _result(block: schema.ToolResultBlock) -> str:
    content = block.content or ""
    if isinstance(content, list):
        content = "\n".join([item.text for item in content if isinstance(item, schema.TextBlock)])
    return f"Error: {content}" if block.is_error else content


def _part(block: schema.TextBlock | schema.ImageBlock | schema.DocumentBlock) -> chat.Part:
    if isinstance(block, schema.TextBlock):
        return chat.TextPart(text=block.text)
    if isinstance(block, schema.DocumentBlock):
        title = "" if block.title is None else f"{block.title}\n\n"
        return chat.TextPart(text=title + block.source.data)
    source = block.source
    if isinstance(source, schema.UrlSource):
        return chat.ImagePart(image_url=chat.ImageUrl(url=source.url))
    url = f"data:{source.media_type};base64,{source.data}"
    return chat.ImagePart(image_url=chat.ImageUrl(url=url))


def _misplaced(block: schema.Block, param: str, role: str) -> BadRequest:
    kind = block.__struct_config__.tag
    message = (
        f"`{param}`: blocks of type `{kind}` are taken in messages of the {role} only; move it"
    )
    return UnsupportedParameter(message, param=param)
