"""Convert items to the messages of a chat, and say which item each message came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from motet_gateway.openai import schema as chat
from motet_shared.errors import BadRequest, ContextTooLong, UnsupportedParameter

from . import items
from .files import file_text
from .reasoning import reasoning_of
from .tools import INPUT

_DETAIL = {"original": "high"}
_MOST_REASONING = 16 << 20  # characters of the reasoning of all items of a conversation


@dataclass(frozen=True, slots=True)
class Placed:
    """An item and its path in the request, such as input[2]."""

    item: items.Item
    param: str


@dataclass(slots=True)
class Messages:
    """Messages of a chat, and for each the path of the item that it begins with."""

    messages: list[chat.Message] = field(default_factory=list)
    params: list[str] = field(default_factory=list)
    # Joined by `finish`: of the system message at the beginning, and the reasoning of replies.
    _system: list[str] = field(default_factory=list)
    _reasoning: list[tuple[chat.AssistantMessage, list[str]]] = field(default_factory=list)
    _reasoning_size: int = 0  # characters

    def add(self, message: chat.Message, param: str) -> None:
        self.messages.append(message)
        self.params.append(param)

    def reply(self, param: str) -> chat.AssistantMessage:
        """Return the message of the assistant's turn that is being built, or begin one."""
        last = self.messages[-1] if self.messages else None
        if not isinstance(last, chat.AssistantMessage):
            last = chat.AssistantMessage()
            self.add(last, param)
        return last

    def add_system(self, text: str, param: str) -> None:
        """Add a system message; those at the beginning become one."""
        if not self.messages:
            self.add(chat.SystemMessage(content=""), param)
            self._system.append(text)
        elif self._system and len(self.messages) == 1:
            self._system.append(text)
        else:
            self.add(chat.SystemMessage(content=text), param)

    def add_reasoning(self, text: str, param: str) -> None:
        """Add reasoning to a reply. Raises ContextTooLong beyond _MOST_REASONING."""
        self._reasoning_size += len(text)
        if self._reasoning_size > _MOST_REASONING:
            raise ContextTooLong(
                f"`{param}`: the reasoning of all items has more than {_MOST_REASONING} characters;"
                " leave out that of earlier turns",
                param=param,
            )
        reply = self.reply(param)
        if not self._reasoning or self._reasoning[-1][0] is not reply:
            self._reasoning.append((reply, []))
        self._reasoning[-1][1].append(text)

    def finish(self) -> None:
        """Join what was added in pieces."""
        for reply, pieces in self._reasoning:
            reply.reasoning_content = "".join(pieces)
        if self._system:
            self.messages[0].content = "\n\n".join(self._system)
        for message in self.messages:
            if isinstance(message, chat.AssistantMessage) and not (
                message.tool_calls or message.images
            ):
                message.content = message.content or ""  # a turn that ended within its reasoning


async def as_messages(placed: Sequence[Placed], instructions: str | None) -> Messages:
    """Return the messages of a chat.

    Instructions and system messages at the beginning become one message, as most chat templates
    take a single one. A turn of the assistant is one message, with its reasoning and its calls.
    Raises BadRequest for an output without its call or the reverse, and for what a message cannot
    hold; ContextTooLong for more reasoning than a conversation may have.
    """
    found = Messages()
    if instructions:
        found.add_system(instructions, "instructions")
    _check_calls(placed)
    for one in placed:
        await _add(found, one)
    found.finish()
    return found


async def _add(found: Messages, placed: Placed) -> None:
    item, param = placed.item, placed.param
    match item:
        case items.InputMessage():
            await _add_message(found, item, param)
        case items.ReasoningItem():
            found.add_reasoning(reasoning_of(item, param), param)
        case items.FunctionCallItem():
            _add_call(found, item.call_id, item.name, item.arguments, param)
        case items.CustomToolCallItem():
            arguments = msgspec.json.encode({INPUT: item.input}).decode()
            _add_call(found, item.call_id, item.name, arguments, param)
        case items.FunctionCallOutput() | items.CustomToolCallOutput():
            content = await _text(item.output, f"{param}.output")
            found.add(chat.ToolMessage(content=content, tool_call_id=item.call_id), param)
        case items.ImageCallItem():
            _add_image(found, item, param)
        case items.ItemReference():
            raise BadRequest(f"`{param}.id` {item.id[:80]!r} does not exist", param=f"{param}.id")


# --------------------------------------------------------------------------------------- messages
async def _add_message(found: Messages, item: items.InputMessage, param: str) -> None:
    where = f"{param}.content"
    if item.role == "user":
        found.add(chat.UserMessage(content=await _user_content(item.content, where)), param)
        return
    text = await _text(item.content, where)
    if item.role == "assistant":
        reply = found.reply(param)
        if reply.content or reply.tool_calls:  # a message of its own, behind the last one
            reply = chat.AssistantMessage()
            found.add(reply, param)
        reply.content = text
        return
    found.add_system(text, param)


async def _user_content(content: str | list[items.Part], where: str) -> str | list[chat.Part]:
    """Return the content of a user's message, part for part."""
    if isinstance(content, str):
        return content
    parts: list[chat.Part] = []
    for index, part in enumerate(content):
        param = f"{where}[{index}]"
        if isinstance(part, items.InputImage):
            parts.append(chat.ImagePart(image_url=_image(part, param)))
        else:
            parts.append(chat.TextPart(text=await _part_text(part, param)))
    return parts


def _image(part: items.InputImage, param: str) -> chat.ImageUrl:
    if part.image_url is None:
        raise BadRequest(f"`{param}.image_url` is required", param=f"{param}.image_url")
    detail = part.detail and _DETAIL.get(part.detail, part.detail)
    return msgspec.convert({"url": part.image_url, "detail": detail}, chat.ImageUrl)


async def _text(content: str | list[items.Part], where: str) -> str:
    """Return content that has to be text, parts joined by line breaks."""
    if isinstance(content, str):
        return content
    texts = [await _part_text(part, f"{where}[{i}]") for i, part in enumerate(content)]
    return "\n".join(texts)


async def _part_text(part: items.Part, param: str) -> str:
    match part:
        case items.InputText() | items.OutputText():
            return part.text
        case items.Refusal():
            return part.refusal
        case items.InputFile():
            return await file_text(part, param)
        case items.InputImage():
            message = f"`{param}`: images are accepted in messages of the user only; move it there"
            raise UnsupportedParameter(message, param=param)


# ------------------------------------------------------------------------------------------ calls
def _add_call(found: Messages, call_id: str, name: str, arguments: str, param: str) -> None:
    call = chat.ToolCall(
        id=call_id,
        type="function",
        function=chat.FunctionCall(name=name, arguments=arguments),
    )
    reply = found.reply(param)
    reply.tool_calls = reply.tool_calls or []
    reply.tool_calls.append(call)


def _check_calls(placed: Sequence[Placed]) -> None:
    """Raise BadRequest unless each call is followed by its output, and each output has a call."""
    calls: dict[str, str] = {}
    for one in placed:
        match one.item:
            case items.FunctionCallItem() | items.CustomToolCallItem():
                calls[one.item.call_id] = one.param
            case items.FunctionCallOutput() | items.CustomToolCallOutput():
                if calls.pop(one.item.call_id, None) is None:
                    param = f"{one.param}.call_id"
                    shown = one.item.call_id[:80]
                    raise BadRequest(f"`{param}`: there is no call {shown!r} before", param=param)
    if calls:
        call_id = next(iter(calls))
        message = f"`input`: there is no output of the tool call {call_id[:80]!r}; add it"
        raise BadRequest(message, param="input")


def _add_image(found: Messages, item: items.ImageCallItem, param: str) -> None:
    """Add an image of an earlier response, as a chat returns it."""
    if item.result is None:
        return
    url = f"data:image/{item.output_format or 'png'};base64,{item.result}"
    drawn = chat.DrawnImage(image_url=chat.ImageUrl(url=url), revised_prompt=item.revised_prompt)
    reply = found.reply(param)
    reply.images = reply.images or []
    reply.images.append(drawn)
