"""Parse tool calls from streamed text, in the format of Hermes and Qwen.

    <tool_call>
    {"name": "draw", "arguments": {"shape": "circle"}}
    </tool_call>

The name is emitted first, then `arguments` as they grow; text around the calls stays text. Text
that cannot be parsed as a call stays text too, tags included. White space next to a call belongs to
the format and is dropped, so it is held back until it is clear what follows. The output after n
characters is the same however they were grouped into calls of `feed`.
"""

from __future__ import annotations

import hashlib
import json
import re
from enum import Enum

from motet_shared.messages import ToolCallDelta

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')
_MARK = re.compile(r'["{}\[\]<]')
_DEPTH = {"{": 1, "[": 1, "}": -1, "]": -1}
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)


class _State(Enum):
    TEXT = "text"
    HEAD = "head"  # after the tag, before the arguments
    ARGUMENTS = "arguments"
    TAIL = "tail"  # after the arguments


class ToolParser:
    """Keep the parser state of one request. `calls` counts the complete calls."""

    __slots__ = (
        "_after_call",
        "_buffer",
        "_deltas",
        "_depth",
        "_in_string",
        "_index",
        "_lead",
        "_request_id",
        "_state",
        "_text",
        "calls",
    )

    def __init__(self, request_id: str):
        self._request_id = request_id
        self._state = _State.TEXT
        self._buffer = ""  # text not yet decided
        self._lead = ""  # white space before the tag, restored if the call turns out to be text
        self._after_call = False  # only white space since the last call
        self._depth = 0  # open brackets of the arguments
        self._in_string = False  # within them
        self._index = 0  # number of the next call
        self._text: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self.calls = 0

    def feed(self, text: str) -> tuple[str, list[ToolCallDelta] | None]:
        """Return (text, pieces of tool calls) that have become certain."""
        if text:
            self._buffer += text
            while self._advance():
                pass
        return self._take()

    def flush(self) -> tuple[str, list[ToolCallDelta] | None]:
        """Return the rest, at the end. A call without closing tag counts if it can be parsed."""
        rest, self._buffer = self._buffer, ""
        if self._state is _State.HEAD:
            self._finish_whole(rest, "")
        elif self._state is _State.TEXT:
            self._text.append(rest)
        self._state = _State.TEXT
        return self._take()

    def _take(self) -> tuple[str, list[ToolCallDelta] | None]:
        text = "".join(self._text)
        deltas = self._deltas or None
        if text:
            self._text = []
        if deltas:
            self._deltas = []
        return text, deltas

    def _advance(self) -> bool:
        """Make one transition. Return False when more text is needed."""
        if self._state is _State.TEXT:
            return self._find_tag()
        if self._state is _State.HEAD:
            return self._read_head()
        if self._state is _State.ARGUMENTS:
            return self._read_arguments()
        return self._read_tail()

    # --------------------------------------------------------------------------------------- states
    def _find_tag(self) -> bool:
        if self._after_call:
            self._buffer = self._buffer.lstrip()
            self._after_call = not self._buffer
        before, tag, after = self._buffer.partition(OPEN)
        cut = _certain(before) if not tag else len(before.rstrip())
        self._text.append(before[:cut])
        if not tag:
            self._buffer = before[cut:]
            return False
        self._lead, self._buffer, self._state = before[cut:], after, _State.HEAD
        return True

    def _read_head(self) -> bool:
        close = self._buffer.find(CLOSE)
        head = _HEAD.match(self._buffer, 0, close if close >= 0 else len(self._buffer))
        if head:
            self._begin(head[1])
            self._buffer, self._state = self._buffer[head.end() :], _State.ARGUMENTS
            self._depth, self._in_string = 0, False
            return True
        if close < 0:
            return False
        body, self._buffer = self._buffer[:close], self._buffer[close + len(CLOSE) :]
        self._state = _State.TEXT
        self._finish_whole(body, CLOSE)
        return True

    def _read_arguments(self) -> bool:
        """Emit the JSON object up to its closing brace, or to a closing tag outside of strings."""
        text, end = self._buffer, self._scan(self._buffer)
        self._arguments(text[:end])
        self._buffer = text[end:]
        if self._depth == 0:
            self._state = _State.TAIL
        elif not self._in_string and self._buffer.startswith(CLOSE):
            self._buffer, self._state = self._buffer[len(CLOSE) :], _State.TEXT
        else:
            return False
        self._after_call = True
        self.calls += 1
        return True

    def _scan(self, text: str) -> int:
        """Return how much of `text` is certainly arguments: no partial escape or possible tag."""
        at = 0
        while at < len(text):
            if self._in_string:
                at = _string_end(text, at)
                if at == len(text) or text[at] == "\\":
                    return at
                self._in_string = False
                at += 1
                continue
            mark = _MARK.search(text, at)
            if mark is None:
                return len(text)
            if mark[0] == "<" and (
                text.startswith(CLOSE, mark.start()) or CLOSE.startswith(text[mark.start() :])
            ):
                return mark.start()
            at = mark.end()
            self._in_string = mark[0] == '"'
            self._depth += _DEPTH.get(mark[0], 0)
            if self._depth == 0:
                return at
        return at

    def _read_tail(self) -> bool:
        """Drop `}`, the closing tag, and keys in between.

        Text in place of the tag ends the call too.
        """
        rest = self._buffer.lstrip()
        if rest.startswith("}"):
            rest = rest[1:].lstrip()
        extra = rest.startswith(",")
        close = rest.find(CLOSE)
        if close == 0 or (extra and close > 0):
            self._buffer = rest[close + len(CLOSE) :]
        elif extra or CLOSE.startswith(rest):
            return False
        else:
            self._buffer = rest
        self._state = _State.TEXT
        return True

    # --------------------------------------------------------------------------------------- output
    def _begin(self, name: str) -> None:
        self._deltas.append(
            ToolCallDelta(self._index, call_id(self._request_id, self._index), name)
        )
        self._index += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._deltas.append(ToolCallDelta(self._index - 1, arguments=text))

    def _finish_whole(self, body: str, close: str) -> None:
        """Emit a call that could not be streamed (key order, arguments as a string), or text."""
        call = _whole_call(body)
        self._after_call = call is not None
        if call is None:
            self._text.append(self._lead + OPEN + body + close)
            return
        name, arguments = call
        self._begin(name)
        self._arguments(arguments)
        self.calls += 1


def _certain(text: str) -> int:
    """Return how many characters of `text` are certainly no tag and no white space before one."""
    at = text.rfind("<")
    return len(text[:at].rstrip() if at >= 0 and OPEN.startswith(text[at:]) else text.rstrip())


def _string_end(text: str, at: int) -> int:
    """Return the end of the string around `at`: its quote, a partial escape, or `text`'s end."""
    match = _IN_STRING.match(text, at)
    return match.end() if match else at


def _whole_call(body: str) -> tuple[str, str] | None:
    """Return (name, arguments as JSON) of a complete call; None if it is not one."""
    try:
        call = json.loads(body)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str) or not name:
        return None
    arguments = call.get("arguments") or {}
    return name, arguments if isinstance(arguments, str) else json.dumps(
        arguments, ensure_ascii=False
    )


def call_id(request_id: str, index: int) -> str:
    """Return the id of a request's call number `index`, equal in every process."""
    return "call_" + hashlib.blake2b(f"{request_id}/{index}".encode(), digest_size=12).hexdigest()
