"""Hermes and Qwen 2.5 and 3: a JSON object between tags.

<tool_call>
{"name": "draw", "arguments": {"shape": "circle"}}
</tool_call>

(NousResearch, "Hermes-Function-Calling", 2024.) The name is emitted first, then `arguments` as they
grow. An object with other keys or another order is a call once it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import Enum

from .json_calls import json_call_rules
from .parser import ObjectScanner, ToolParser
from .tool import Tool
from .tool_format import CallGrammar, ToolFormat, literal

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]{1,256})"\s*,\s*"arguments"\s*:\s*(?=\{)'
)


class _State(Enum):
    HEAD = "head"  # before the arguments
    ARGUMENTS = "arguments"
    TAIL = "tail"  # after the arguments


class HermesParser(ToolParser):
    opening = OPENING

    def __init__(self, request_id: str, tools: Sequence[Tool] = ()):
        super().__init__(request_id, tools)
        self._state = _State.HEAD
        self._scanner = ObjectScanner(CLOSING)

    def _parse_call(self) -> bool:
        if self._state is _State.HEAD:
            return self._read_head()
        if self._state is _State.ARGUMENTS:
            return self._read_arguments()
        return self._read_tail()

    def _end_call(self, rest: str) -> None:
        """Accept a call without closing tag if it can be parsed."""
        if self._state is _State.HEAD:
            self._read_whole(rest, "", "")
        self._state = _State.HEAD

    def _read_head(self) -> bool:
        close = self._buffer.find(CLOSING)
        head = _HEAD.match(self._buffer, 0, close if close >= 0 else len(self._buffer))
        if head:
            self._begin_call(head[1])
            self._scanner.begin()
            self._buffer, self._state = self._buffer[head.end() :], _State.ARGUMENTS
            return True
        if close < 0:
            return False
        self._read_whole(self._buffer[:close], CLOSING, self._buffer[close + len(CLOSING) :])
        return True

    def _read_whole(self, body: str, close: str, rest: str) -> None:
        """Emit a call that cannot be streamed (key order, arguments as a string), or text."""
        call = _whole_call(body)
        if call is None:
            self._leave(rest, restored=self._lead + body + close)
            return
        name, arguments = call
        self._begin_call(name)
        self._add_arguments(arguments)
        self.calls += 1
        self._leave(rest)

    def _read_arguments(self) -> bool:
        if not self._read_object(self._scanner):
            return False
        if self._scanner.is_complete:
            self._state = _State.TAIL
        else:
            self._leave(self._buffer[len(CLOSING) :])
            self._state = _State.HEAD
        return True

    def _read_tail(self) -> bool:
        """Drop `}`, the closing tag, and keys in between. Text in place of the tag ends it too."""
        rest = self._buffer.lstrip()
        if rest.startswith("}"):
            rest = rest[1:].lstrip()
        extra = rest.startswith(",")
        close = rest.find(CLOSING)
        if close == 0 or (extra and close > 0):
            self._leave(rest[close + len(CLOSING) :])
        elif extra or CLOSING.startswith(rest):
            return False
        else:
            self._leave(rest)
        self._state = _State.HEAD
        return True


def _whole_call(body: str) -> tuple[str, str] | None:
    """Return (name, arguments as JSON) of a complete call; None if it is not one."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str) or not name:
        return None
    arguments = call.get("arguments") or {}
    if isinstance(arguments, str):
        return name, arguments
    return name, json.dumps(arguments, ensure_ascii=False)


def _head(name: str) -> str:
    return f'\n{{"name": {name}, "arguments": '


HERMES = ToolFormat(
    name="hermes",
    markers=(OPENING,),
    tags=(OPENING, CLOSING),
    parser=HermesParser,
    grammar=CallGrammar(
        opening=OPENING,
        call=json_call_rules(_head, f"}}\n{CLOSING}"),
        separator=literal("\n" + OPENING),
    ),
)
