"""Harmony, the format of gpt-oss: messages on channels, told apart by control tokens.

<|channel|>analysis<|message|>The user wants a star.<|end|>
<|start|>assistant<|channel|>commentary to=functions.draw <|constrain|>json<|message|>{…}<|call|>
<|start|>assistant<|channel|>final<|message|>Here it is.<|return|>

(OpenAI, "harmony response format", 2025.) `analysis` is reasoning; `final`, and `commentary` without
a recipient, is text; a message to `functions.NAME` is a call. Only control tokens divide messages:
the same characters in a text mean nothing, so no header can leak into it, or be forged by it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum

from motet_shared.messages import ToolCallDelta
from motet_shared.tool_formats.harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    FINAL,
    FUNCTIONS,
    MESSAGE,
    RETURN,
    START,
)
from motet_shared.tool_formats.parser import call_id
from motet_shared.tool_formats.tool import Tool

from .reasoning_format import Beginning, Message, ReasoningFormat
from .reply_parser import Parts, ReplyParser

_ENDS = (END, CALL, RETURN)
_RECIPIENT = re.compile(r"\bto=(\S+)")
_HEAD = " to="  # what a header may begin with, besides a control token
# Messages before the last one, in a grammar.
_BEFORE = f"""\
before: {CHANNEL} ("analysis" | "commentary") {MESSAGE} TEXT {END} {START} "assistant"
TEXT: /(.|\\n)*/
"""


class Harmony(ReasoningFormat):
    name = "harmony"
    markers = (CHANNEL, MESSAGE, "analysis")
    ends = (RETURN, CALL)
    levels = ("low", "medium", "high")
    parses_tools = True

    def beginning(self, prompt: str) -> Beginning:
        message = prompt.rpartition(START)[2]
        return Beginning.CLOSED if MESSAGE in message else Beginning.OPTIONAL

    def parser(
        self, beginning: Beginning, request_id: str = "", tools: Sequence[Tool] = ()
    ) -> ReplyParser:
        return HarmonyParser(beginning, request_id, tools)

    def frame(self, beginning: Beginning, *, calls: bool = False) -> str:
        """Return the grammar of the messages that may precede an answer.

        calls: the answer may be a tool call; the grammar of calls then begins with its own header.
        """
        if beginning is Beginning.CLOSED and not calls:
            return ""
        return f"start: before* {'' if calls else FINAL} @answer\n{_BEFORE}"

    def history(self, message: Message, template: str) -> Message:
        """Join text and reasoning of a reply with calls, as the template takes one of them."""
        reasoning, content = message.get("reasoning_content"), message.get("content")
        if not (message.get("tool_calls") and reasoning and isinstance(content, str) and content):
            return message
        return {**message, "content": "", "reasoning_content": f"{reasoning}\n\n{content}"}


HARMONY = Harmony()


class _Kind(Enum):
    """Enumerate the kinds of parts of a reply."""

    BEGINNING = "beginning"  # nothing yet: a header, or text of a model that writes none
    HEADER = "header"
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"
    BETWEEN = "between"  # behind a message


class HarmonyParser(ReplyParser):
    """Parse one reply. tools: the functions that may be called; without any, none is."""

    def __init__(self, beginning: Beginning, request_id: str = "", tools: Sequence[Tool] = ()):
        self._kind = _Kind.TEXT if beginning is Beginning.CLOSED else _Kind.BEGINNING
        self._request_id = request_id
        self._takes_calls = bool(tools)
        self._header = ""
        self._header_tokens = 0
        self._index = -1  # of the current call
        self._has_arguments = False

    def feed(self, control: str, text: str) -> Parts:
        before = self._kind
        parts = self._control(control) if control else self._add(text)
        self.hides = _Kind.TEXT not in (before, self._kind) or bool(control)
        if _Kind.REASONING in (before, self._kind):
            self.reasoning_tokens += 1
        return parts

    def flush(self, text: str) -> Parts:
        parts = self._add(text)
        if self._kind is _Kind.BEGINNING:  # what might have been a header was none
            parts, self._header = Parts(text=self._header), ""
        ending = self._end_message()
        return Parts(parts.reasoning, parts.text, [*(parts.tools or ()), *(ending or ())] or None)

    def _add(self, text: str) -> Parts:
        if self._kind is _Kind.BEGINNING:
            return self._begin(text)
        if self._kind is _Kind.HEADER:
            self._header += text
            self._header_tokens += 1
        elif self._kind is _Kind.REASONING:
            return Parts(reasoning=text)
        elif self._kind is _Kind.TEXT:
            return Parts(text=text)
        elif self._kind is _Kind.CALL and text:
            self._has_arguments = True
            return Parts(tools=[ToolCallDelta(self._index, arguments=text)])
        return Parts()

    def _begin(self, text: str) -> Parts:
        """Take the first characters of a reply: a recipient, or text without a header."""
        self._header += text
        self._header_tokens += 1
        if _HEAD.startswith(self._header[: len(_HEAD)]):
            return Parts()
        text, self._header, self._kind = self._header, "", _Kind.TEXT
        return Parts(text=text)

    def _control(self, control: str) -> Parts:
        in_header = self._kind in (_Kind.HEADER, _Kind.BEGINNING)
        if control == MESSAGE and in_header:
            return self._begin_message()
        ending = None
        if control in (START, CHANNEL, *_ENDS):
            ending = self._end_message()
            self._kind = _Kind.BETWEEN if control in _ENDS else _Kind.HEADER
        if control == START or (control == CHANNEL and not in_header):
            self._header, self._header_tokens = "", 0
        if self._kind is _Kind.HEADER:
            self._header += control
            self._header_tokens += 1
        return Parts(tools=ending)

    def _begin_message(self) -> Parts:
        """Return the kind of a message, read from its header."""
        recipient = _RECIPIENT.search(self._header.replace(CHANNEL, " ").replace(CONSTRAIN, " "))
        channel = self._header.partition(CHANNEL)[2].strip()
        if recipient is not None and self._takes_calls and not channel.startswith("analysis"):
            self._kind = _Kind.CALL
            self._index, self._has_arguments = self._index + 1, False
            identity = call_id(self._request_id, self._index)
            name = recipient[1].removeprefix(FUNCTIONS)
            return Parts(tools=[ToolCallDelta(self._index, identity, name)])
        is_text = recipient is None and not channel.startswith("analysis")
        self._kind = _Kind.TEXT if is_text else _Kind.REASONING
        if not is_text:
            self.reasoning_tokens += self._header_tokens
        return Parts()

    def _end_message(self) -> list[ToolCallDelta] | None:
        """Complete a call, if the message is one."""
        if self._kind is not _Kind.CALL:
            return None
        self._kind = _Kind.BETWEEN
        self.calls += 1
        if self._has_arguments:
            return None
        return [ToolCallDelta(self._index, arguments="{}")]
