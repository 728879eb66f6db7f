"""Build the content blocks of a reply, and the events that show them while they grow."""

from __future__ import annotations

import base64
import hashlib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from motet_shared.messages import End, Text, ToolCallDelta, Usage


def event(kind: str, **fields: Any) -> bytes:
    """Render one server-sent event."""
    data = msgspec.json.encode({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


class Content:
    """Build the content blocks of one message; `take` returns the events since its last call."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self.called_tools = False
        self._events: list[bytes] = []
        self._open = ""  # type of the block that grows
        self._texts: list[str] = []  # pieces of that block
        self._call = -1  # index of the tool call that is open
        self._held = ""  # white space that precedes a text, or else a call

    def take(self) -> bytes:
        """Return the events that are new."""
        data, self._events = b"".join(self._events), []
        return data

    def add(self, batch: Sequence[Text]) -> None:
        """Add what the model wrote: reasoning, text and tool calls, in this order in each item.

        What goes on with an open call precedes them: an item may hold its end and the text behind it.
        """
        for item in batch:
            pieces = deque(item.tools or ())
            while pieces and self._open == "tool_use" and pieces[0].index == self._call:
                self._tool(pieces.popleft())
            if item.reasoning:
                self._begin("thinking", thinking="", signature="")
                self._grow("thinking_delta", "thinking", item.reasoning)
            if item.text:
                self._text(item.text)
            for piece in pieces:
                self._tool(piece)

    def finish(self) -> None:
        """End the open block."""
        if not self._open:
            return
        block, whole = self.blocks[-1], "".join(self._texts)
        if self._open == "tool_use":
            with suppress(msgspec.DecodeError):  # arguments that `max_tokens` cut off
                block["input"] = msgspec.json.decode(whole or "{}")
        else:
            block[self._open] = whole
        if self._open == "thinking":
            block["signature"] = _signature(whole)
            self._delta({"type": "signature_delta", "signature": block["signature"]})
        self._emit("content_block_stop")
        self._open, self._texts = "", []

    def _text(self, text: str) -> None:
        if self._open != "text":
            self._held += text
            if not self._held.strip():
                return
            text, self._held = self._held, ""
            self._begin("text", text="")
        self._grow("text_delta", "text", text)

    def _tool(self, piece: ToolCallDelta) -> None:
        if piece.index != self._call or self._open != "tool_use":
            self.finish()
            self._call, self._held, self.called_tools = piece.index, "", True
            self._begin("tool_use", id=piece.id, name=piece.name, input={})
        if piece.arguments:
            self._grow("input_json_delta", "partial_json", piece.arguments)

    def _begin(self, kind: str, **fields: Any) -> None:
        """Begin a block unless one of this kind is open."""
        if self._open == kind:
            return
        self.finish()
        self._open = kind
        self.blocks.append({"type": kind, **fields})
        self._emit("content_block_start", content_block=self.blocks[-1])

    def _grow(self, kind: str, name: str, text: str) -> None:
        self._texts.append(text)
        self._delta({"type": kind, name: text})

    def _delta(self, delta: dict[str, str]) -> None:
        self._emit("content_block_delta", delta=delta)

    def _emit(self, kind: str, **fields: Any) -> None:
        self._events.append(event(kind, index=len(self.blocks) - 1, **fields))


def _signature(text: str) -> str:
    """Return a digest of reasoning; clients send it back, and some drop blocks without one."""
    return base64.b64encode(hashlib.sha256(text.encode("utf-8", "replace")).digest()).decode()


def stopped(end: End, *, called_tools: bool) -> dict[str, str | None]:
    """Return why a message ended."""
    reason = "end_turn"
    if end.status == "length":
        reason = "max_tokens"
    elif end.stop:
        reason = "stop_sequence"
    elif called_tools:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": end.stop or None}


def usage_of(usage: Usage | None) -> dict[str, int]:
    """Return the usage of a message; `input_tokens` does not count cached ones."""
    usage = usage or Usage()
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
