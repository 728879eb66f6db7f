"""Parse tool calls from streamed text: what the parsers of all formats share.

Text around the calls stays text, and so does text that cannot be parsed as a call, tags included.
White space next to a call belongs to the format and is dropped, so it is held back until the
characters behind it are known.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from motet_shared.messages import ToolCallDelta

from .tool import Tool

_MARK = re.compile(r'["{}\[\]<]')
_DEPTH = {"{": 1, "[": 1, "}": -1, "]": -1}
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)


def encodable(text: str) -> str:
    """Return text without lone surrogates, which UTF-8 has no bytes for; in JSON they stay escapes."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


class ToolParser(ABC):
    """Keep the parser state of one request. `calls` counts the complete calls.

    The output after n characters is the same however they were grouped into calls of `feed`, as
    each transition is made at the first character with which it is certain. A subclass parses what
    follows `opening`.
    """

    opening: ClassVar[str]
    id_length: ClassVar[int] = 0  # characters of a call's id, where the chat templates ask for it

    def __init__(self, request_id: str, tools: Sequence[Tool] = ()):
        self.tools = {tool.name: tool for tool in tools}
        self.calls = 0
        self._request_id = request_id
        self._buffer = ""  # text not yet decided
        self._lead = ""  # text before the buffer that is restored if no call follows
        self._in_call = False
        self._after_call = False  # only white space since the last call
        self._index = 0  # number of the next call
        self._text: list[str] = []
        self._deltas: list[ToolCallDelta] = []

    @property
    def has_begun(self) -> bool:
        """Return True from the opening of the first call on."""
        return self._in_call or self.calls > 0

    def feed(self, text: str) -> tuple[str, list[ToolCallDelta] | None]:
        """Return (text, pieces of tool calls) that have become certain."""
        if text:
            self._buffer += text
            while self._parse_call() if self._in_call else self._find_opening():
                pass
        return self._take()

    def flush(self) -> tuple[str, list[ToolCallDelta] | None]:
        """Return the rest, at the end of the reply."""
        rest, self._buffer = self._buffer, ""
        if self._in_call:
            self._end_call(rest)
        else:
            self._text.append(rest)
        self._in_call = False
        return self._take()

    def _take(self) -> tuple[str, list[ToolCallDelta] | None]:
        text = "".join(self._text)
        deltas = self._deltas or None
        if text:
            self._text = []
        if deltas:
            self._deltas = []
        return text, deltas

    # --------------------------------------------------------------------- parts of a subclass
    @abstractmethod
    def _parse_call(self) -> bool:
        """Make one transition behind `opening`. Return False if more text is needed."""

    @abstractmethod
    def _end_call(self, rest: str) -> None:
        """Take the undecided rest of a reply that ends behind `opening`."""

    # -------------------------------------------------------------------------------- transitions
    def _find_opening(self) -> bool:
        if self._after_call:
            self._buffer = self._buffer.lstrip()
            self._after_call = not self._buffer
        before, tag, after = self._buffer.partition(self.opening)
        cut = len(before.rstrip()) if tag else self._certain(before)
        self._text.append(before[:cut])
        if not tag:
            self._buffer = before[cut:]
            return False
        self._lead, self._buffer, self._in_call = before[cut:] + tag, after, True
        return True

    def _certain(self, text: str) -> int:
        """Return how many characters of `text` are no part of a tag or of white space before it."""
        longest = min(len(text), len(self.opening) - 1)
        sizes = range(longest, 0, -1)
        partial = next((size for size in sizes if text.endswith(self.opening[:size])), 0)
        return len(text[: len(text) - partial].rstrip())

    def _begin_call(self, name: str, identity: str = "") -> None:
        """Emit the name of a call, with the id that the model gave it, if it did."""
        identity = identity or call_id(self._request_id, self._index)
        if self.id_length:
            identity = short_id(identity, self.id_length)
        self._deltas.append(ToolCallDelta(self._index, identity, encodable(name)))
        self._index += 1
        self._lead = ""

    def _add_arguments(self, text: str) -> None:
        if text:
            self._deltas.append(ToolCallDelta(self._index - 1, arguments=encodable(text)))

    def _read_object(self, scanner: ObjectScanner) -> bool:
        """Emit arguments up to their closing brace, or to the scanner's closing tag.

        Return False if more text is needed.
        """
        end = scanner.scan(self._buffer)
        self._add_arguments(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if not scanner.is_complete and not scanner.is_closed(self._buffer):
            return False
        self.calls += 1
        return True

    def _leave(self, rest: str, *, restored: str = "") -> None:
        """Continue with `rest` as text, behind `restored`, or behind a call if that is empty."""
        self._text.append(restored)
        self._buffer, self._lead = rest, ""
        self._in_call, self._after_call = False, not restored


class ObjectScanner:
    """Find the end of a JSON object in streamed text.

    close: a tag that ends the object too, where it stands outside of strings; empty: none.
    """

    __slots__ = ("_close", "_depth", "_in_string")

    def __init__(self, close: str = ""):
        self._close = close
        self._depth = 0  # open brackets
        self._in_string = False

    def begin(self) -> None:
        """Start before the first character of an object."""
        self._depth, self._in_string = 0, False

    @property
    def is_complete(self) -> bool:
        """Return True if the object is closed. Before its first character it counts as closed."""
        return self._depth == 0

    def is_closed(self, rest: str) -> bool:
        """Return True if the rest behind what was scanned begins with the closing tag."""
        return bool(self._close) and not self._in_string and rest.startswith(self._close)

    def scan(self, text: str) -> int:
        """Return how much of `text` is certainly the object's: no partial escape, no possible tag.

        Call it again with the rest of `text` and what follows.
        """
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
            if mark[0] == "<" and self._may_close(text, mark.start()):
                return mark.start()
            at = mark.end()
            self._in_string = mark[0] == '"'
            self._depth += _DEPTH.get(mark[0], 0)
            if self._depth == 0:
                return at
        return at

    def _may_close(self, text: str, at: int) -> bool:
        rest = text[at : at + len(self._close)]
        return bool(self._close) and self._close.startswith(rest)


def _string_end(text: str, at: int) -> int:
    """Return the end of the string around `at`: its quote, a partial escape, or `text`'s end."""
    match = _IN_STRING.match(text, at)
    return match.end() if match else at


def short_id(identity: str, length: int) -> str:
    """Return an id as it is if it has `length` letters and digits, else one made of it."""
    if len(identity) == length and identity.isalnum():
        return identity
    return hashlib.blake2b(identity.encode(), digest_size=length).hexdigest()[:length]


def call_id(request_id: str, index: int) -> str:
    """Return the id of a request's call number `index`, equal in every process."""
    return "call_" + hashlib.blake2b(f"{request_id}/{index}".encode(), digest_size=12).hexdigest()
