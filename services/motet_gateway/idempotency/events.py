"""Number the events of OpenAI's streams by what they have said, and go on behind such a number.

Where a stream is cut into events differs between two runs of one request; what it says does not. So
the id of an event counts what all events up to it have said: characters of the text, of the
reasoning and of the arguments of each tool call, entries of log-probabilities, and so on, by choice.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from motet_shared.errors import BadRequest

_PART = re.compile(r"[0-9]{1,6}[a-z][0-9]{0,4}=[0-9]{1,9}")
_MAX_PARTS = 4096
_END = b"\n\n"
_DATA = b"data: "
_FAILED = ("response.failed", "error")  # types of events of /v1/responses
_OBJECTS = ("chat.completion.chunk", "text_completion")
_decode, _encode = msgspec.json.Decoder().decode, msgspec.json.Encoder().encode

# Something that an event says: its kind, how much of it there is, and how to leave out the beginning.
Piece = tuple[str, int, Callable[[int], None]]


def parse_id(text: str) -> Counter[str]:
    """Return what a client has had by its `Last-Event-ID`. Raises BadRequest."""
    parts = text.split(",")
    if len(parts) > _MAX_PARTS or not all(_PART.fullmatch(part) for part in parts):
        raise BadRequest(
            f"`Last-Event-ID`: {text[:80]!r} is no id of a stream; send the last one as it came",
            param="Last-Event-ID",
        )
    return Counter({name: int(count) for name, _, count in (p.partition("=") for p in parts)})


class Events:
    """Split a stream into events and count what they say. Subclasses render each anew."""

    def __init__(self) -> None:
        self.said: Counter[str] = Counter()
        self.has_failed = False  # True: the stream has told an error
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Return the events that are complete, rendered anew."""
        *events, self._rest = (self._rest + data).split(_END)
        return b"".join(map(self._event, events))

    def _event(self, event: bytes) -> bytes:
        before, mark, data = event.partition(_DATA)
        found = _decode(data) if mark and data.startswith(b"{") else None
        pieces = list(_pieces(found)) if found is not None else []
        self.has_failed |= found is not None and ("error" in found or found.get("type") in _FAILED)
        if data == b"[DONE]":
            pieces = [("0z", 1, lambda skipped: None)]
        rendered = self.render(event, before, found, pieces)
        for kind, amount, _ in pieces:
            self.said[kind] += amount
        return rendered

    def render(self, event: bytes, before: bytes, found: Any, pieces: list[Piece]) -> bytes:
        """Return an event; `before` is what stands before its data, `found` its decoded data."""
        raise NotImplementedError


class NumberedEvents(Events):
    """Add an `id` to each event that says something."""

    def render(self, event: bytes, before: bytes, found: Any, pieces: list[Piece]) -> bytes:
        if not pieces:
            return event + _END
        said = self.said + Counter({kind: amount for kind, amount, _ in pieces})
        name = ",".join(f"{kind}={count}" for kind, count in said.items())
        return b"id: " + name.encode() + b"\n" + event + _END


class EventsBehind(Events):
    """Leave out what a client has had; an event that it has had a part of says the rest."""

    def __init__(self, had: Counter[str]):
        super().__init__()
        self._had = had

    def render(self, event: bytes, before: bytes, found: Any, pieces: list[Piece]) -> bytes:
        skipped = [
            min(max(self._had[kind] - self.said[kind], 0), amount) for kind, amount, _ in pieces
        ]
        if not any(skipped):
            return event + _END
        if all(skip == amount for skip, (_, amount, _) in zip(skipped, pieces, strict=True)):
            return b""
        for skip, (_, _, leave_out) in zip(skipped, pieces, strict=True):
            if skip:
                leave_out(skip)
        return before + _DATA + _encode(found) + _END


def _pieces(found: dict[str, Any]) -> Iterator[Piece]:
    """Yield what an event says; nothing for events of other formats, and for errors."""
    if found.get("object") not in _OBJECTS:
        return
    for choice in found["choices"]:
        index, delta = choice["index"], choice.get("delta") or {}
        yield from _flag(delta, "role", f"{index}o")
        yield from _sequence(choice, "text", f"{index}c")
        yield from _sequence(delta, "content", f"{index}c")
        yield from _sequence(delta, "reasoning_content", f"{index}r")
        for tool in delta.get("tool_calls") or ():
            yield from _tool(tool, index)
        yield from _logprobs(choice.get("logprobs") or {}, f"{index}l")
        for ids in (choice, delta):
            yield from _sequence(ids, "token_ids", f"{index}i")
        if choice.get("finish_reason"):
            yield f"{index}f", 1, lambda skipped: None
    yield from _sequence(found, "prompt_token_ids", "0p")
    if not found["choices"]:
        yield "0u", 1, lambda skipped: None


def _sequence(holder: dict[str, Any], field: str, kind: str) -> Iterator[Piece]:
    """Yield a text or a list of an event, unless it is empty."""

    def leave_out(count: int) -> None:
        holder[field] = holder[field][count:]

    if holder.get(field):
        yield kind, len(holder[field]), leave_out


def _flag(holder: dict[str, Any], field: str, kind: str) -> Iterator[Piece]:
    """Yield a field that is sent once."""
    if field in holder:
        yield kind, 1, lambda skipped: holder.pop(field)


def _tool(tool: dict[str, Any], index: int) -> Iterator[Piece]:
    """Yield the beginning of a tool call, which names it, and a part of its arguments."""
    function = tool.get("function") or {}

    def leave_out(count: int) -> None:
        for holder, field in ((tool, "id"), (tool, "type"), (function, "name")):
            holder.pop(field, None)

    if "id" in tool:
        yield f"{index}k{tool['index']}", 1, leave_out
    yield from _sequence(function, "arguments", f"{index}a{tool['index']}")


def _logprobs(logprobs: dict[str, Any], kind: str) -> Iterator[Piece]:
    """Yield the entries of log-probabilities: of chats a list, of completions several of one length."""
    columns = [name for name, values in logprobs.items() if isinstance(values, list) and values]

    def leave_out(count: int) -> None:
        for name in columns:
            logprobs[name] = logprobs[name][count:]

    if columns:
        yield kind, len(logprobs[columns[0]]), leave_out
