"""Parse server-sent events and the fields of completion chunks that are measured."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Raw, Struct

DONE = b"[DONE]"


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Raw = Raw(b"")


class _Choice(Struct):
    delta: _Delta | None = None
    text: str | None = None

    @property
    def has_tokens(self) -> bool:
        """Return True for a chunk with text, reasoning or a tool call, not just the role."""
        if self.text:
            return True
        if self.delta is None:
            return False
        delta = self.delta
        return (
            bool(delta.content or delta.reasoning_content or delta.reasoning)
            or bytes(delta.tool_calls)[:2] == b"[{"
        )


class _Cached(Struct):
    cached_tokens: int | None = None


class Usage(Struct):
    """Hold the token counts of OpenAI's `usage` object."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Cached | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details is not None else 0


class CompletionChunk(Struct):
    """Represent the data of one event.

    timing: seconds by `<role>.<stage>`, which Motet sends with the usage.
    """

    choices: list[_Choice] = []
    usage: Usage | None = None
    timing: dict[str, float] = {}
    error: Raw = Raw(b"")

    @property
    def has_tokens(self) -> bool:
        return any(choice.has_tokens for choice in self.choices)


decode_chunk: Callable[[bytes], CompletionChunk] = msgspec.json.Decoder(CompletionChunk).decode


class EventParser:
    """Split the bytes of an event stream into the data of complete events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of each event that `data` completes."""
        data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        return [text for event in events if (text := _data(event))]


def _data(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = (line for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)


def error_kind(raw: bytes) -> tuple[str, str]:
    """Return (code, message) of a JSON error body in any of the common shapes.

    A body without a code yields "error" and its text.
    """
    try:
        found = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        found = None
    if isinstance(found, dict) and isinstance(found.get("error"), (dict, str)):
        found = found["error"]
    if isinstance(found, dict):
        code = found.get("code") or found.get("type") or "error"
        return str(code), str(found.get("message") or "")
    return "error", str(found or raw[:200].decode("utf-8", "replace"))
