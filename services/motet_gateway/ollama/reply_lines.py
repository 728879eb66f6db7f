"""Render replies in Ollama's format: lines of JSON while a reply grows, or one object."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from motet_gateway.openai.logprobs import chat_logprobs
from motet_shared.messages import End, Text, ToolCallDelta, Usage

Kind = Literal["chat", "generate"]
_NANOSECONDS = 1_000_000_000


@dataclass(slots=True)
class _Call:
    """A tool call while its arguments arrive."""

    index: int
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def render(self) -> dict[str, Any]:
        """Return the call; arguments that the token limit cut off are empty."""
        arguments: Any = {}
        with suppress(msgspec.DecodeError):
            arguments = msgspec.json.decode("".join(self.arguments) or "{}")
        function = {"index": self.index, "name": self.name, "arguments": arguments}
        return {"id": self.id, "function": function}


class ReplyLines:
    """Render one reply: `add` batches, then `finish`; or `collect` them, then `whole`.

    A chat has its text in `message`, a generation in `response`. A tool call is shown once it is
    complete.
    """

    def __init__(self, kind: Kind, model: str):
        self._kind, self._model = kind, model
        self._call: _Call | None = None
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []

    def add(self, batch: Sequence[Text]) -> bytes:
        """Return the lines of what the model wrote."""
        lines = []
        for item in batch:
            calls, logprobs = self._parts(item)
            if item.text or item.reasoning or calls or logprobs:
                shown = self._object(item.text, item.reasoning, calls, logprobs)
                lines.append(_line(shown | {"done": False}))
        return b"".join(lines)

    def collect(self, batch: Sequence[Text]) -> None:
        """Keep what the model wrote for `whole`."""
        for item in batch:
            calls, logprobs = self._parts(item)
            self._texts.append(item.text)
            self._thoughts.append(item.reasoning)
            self._calls += calls
            self._logprobs += logprobs

    def finish(self, end: End, durations: dict[str, int]) -> bytes:
        """Return the last lines: a tool call that was open, and the object with the counts."""
        calls = self._closed()
        lines = _line(self._object("", calls=calls) | {"done": False}) if calls else b""
        return lines + _line(self._object("") | final(end, durations))

    def whole(self, end: End, durations: dict[str, int]) -> bytes:
        """Return the collected reply as one object."""
        text, thinking = "".join(self._texts), "".join(self._thoughts)
        calls = [*self._calls, *self._closed()]
        shown = self._object(text, thinking, calls, self._logprobs)
        return msgspec.json.encode(shown | final(end, durations))

    def _parts(self, item: Text) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the tool calls that an item completes, and its log-probabilities."""
        calls = [call for piece in item.tools or () for call in self._piece(piece)]
        logprobs = [] if item.logprobs is None else chat_logprobs(item.logprobs)["content"]
        return calls, logprobs

    def _piece(self, piece: ToolCallDelta) -> list[dict[str, Any]]:
        """Take a piece of a call; return the call before it, if that is complete now."""
        closed = []
        if self._call is None or piece.index != self._call.index:
            closed = self._closed()
            self._call = _Call(piece.index, piece.id, piece.name)
        self._call.arguments.append(piece.arguments)
        return closed

    def _closed(self) -> list[dict[str, Any]]:
        call, self._call = self._call, None
        return [] if call is None else [call.render()]

    def _object(
        self,
        text: str,
        thinking: str = "",
        calls: Sequence[dict[str, Any]] = (),
        logprobs: Sequence[dict[str, Any]] = (),
    ) -> dict[str, Any]:
        written: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls:
            written["tool_calls"] = calls
        if self._kind == "chat":
            written = {"message": {"role": "assistant", "content": text, **written}}
        else:
            written = {"response": text, **written}
        if logprobs:
            written["logprobs"] = logprobs
        return {"model": self._model, "created_at": now(), **written}


def final(end: End, durations: dict[str, int]) -> dict[str, Any]:
    """Return the fields of the last object: why the reply ended, counts and nanoseconds."""
    usage = end.usage or Usage()
    counts = {
        "prompt_eval_count": usage.prompt_tokens,
        "eval_count": usage.completion_tokens,
    }
    reason = "length" if end.status == "length" else "stop"
    return {"done": True, "done_reason": reason, **durations, **counts}


def durations_of(stages: dict[str, float]) -> dict[str, int]:
    """Return nanoseconds by Ollama's names, of seconds by `<role>.<stage>`.

    load_duration: waiting for a model and for its turn.
    """
    prefill, decode = stages.get("decode.prefill", 0.0), stages.get("decode.decode", 0.0)
    total = stages.get("gateway.total", prefill + decode)
    waited = stages.get("gateway.first", total) - prefill - stages.get("tokenizer.encode", 0.0)
    return {
        "total_duration": nanoseconds(total),
        "load_duration": nanoseconds(waited),
        "prompt_eval_duration": nanoseconds(prefill),
        "eval_duration": nanoseconds(decode),
    }


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * _NANOSECONDS))


def now() -> str:
    """Return the time as RFC 3339 in UTC."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _line(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"
