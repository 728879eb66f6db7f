"""Render the server-sent events of the chat and completion endpoints from pre-rendered parts.

Everything but the text is the same for each token of a choice, so it is rendered once and only the
text is encoded per token: this is the gateway's hot path. `results.py` renders whole JSON bodies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from motet_gateway.http.problems import Problem
from motet_shared.messages import End, PromptPiece, Text, ToolCallDelta, Usage

from .logprobs import TokenEntry, chat_logprobs, completion_logprobs, entries_of, trimmed
from .reply_details import NO_DETAILS, ReplyDetails

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
_MARK = "\x00text\x00"
_MARK_JSON = _encode(_MARK)


def event(data: Any) -> bytes:
    """Render one server-sent event with JSON data."""
    return b"data: " + _encode(data) + b"\n\n"


def error_event(problem: Problem) -> bytes:
    """Render the event of a stream that breaks after its start.

    OpenAI's SDKs raise an exception on a top-level `error`.
    """
    return event({"error": problem.as_dict()})


class Chunks:
    """Render the events of one response, whose choices share id, time and model.

    Subclasses define the format.
    """

    object: str

    def __init__(
        self,
        response_id: str,
        created: int,
        model: str,
        include_usage: bool = False,
        continuous: bool = False,
        details: ReplyDetails = NO_DETAILS,
    ):
        """Prepare common fields; `continuous` adds the usage so far to each event (as vLLM)."""
        self.details = details
        self._head = {"id": response_id, "object": self.object, "created": created, "model": model}
        self._usage: dict[str, Any] = {"usage": None} if include_usage else {}
        self.include_usage = include_usage
        self.continuous = continuous and include_usage
        self._counts: dict[int, tuple[int, int]] = {}  # (prompt tokens, reply tokens) by choice

    def choice(self, index: int) -> Choice:
        """Return the renderer of one choice's events, which keeps that choice's state."""
        raise NotImplementedError

    def chunk(self, choice: dict[str, Any], **fields: Any) -> bytes:
        """Render an event with one choice; `fields` are added to the event itself."""
        usage = {"usage": self._so_far(choice["index"])} if self.continuous else self._usage
        return event({**self._head, "choices": [choice], **fields, **usage})

    def count(self, index: int, item: Text) -> None:
        """Add the tokens of this item to the usage of its choice."""
        prompt, reply = self._counts.get(index, (0, 0))
        self._counts[index] = (prompt or item.prompt_tokens, reply + len(item.ids))

    def _so_far(self, index: int) -> dict[str, int]:
        prompt, reply = self._counts.get(index, (0, 0))
        return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}

    def usage(self, usage: Usage, timing: dict[str, float]) -> bytes:
        """Render the event before [DONE] with the usage of all choices, if it was requested.

        `timing` is in seconds by `<role>.<stage>`, an extension of OpenAI's format; a body that is
        not streamed has the header `Server-Timing` instead.
        """
        if not self.include_usage:
            return b""
        return event({**self._head, "choices": [], "usage": usage_dict(usage), "timing": timing})

    def split(self, choice: dict[str, Any]) -> tuple[bytes, bytes]:
        """Return the bytes before and after the encoded text of an event whose text is `_MARK`."""
        before, _, after = self.chunk(choice).partition(_MARK_JSON)
        return before, after


class Choice:
    """Render the events of one choice: `batch` for new items, `finish` once at the end."""

    def __init__(self, chunks: Chunks, index: int):
        self._chunks = chunks
        self._index = index
        self._before, self._after = chunks.split(self._as_dict(_MARK))
        self._opened = not chunks.continuous
        self._is_detailed = chunks.continuous or chunks.details.any

    @property
    def is_plain(self) -> bool:
        """Return True if the event of a text depends on nothing but the text."""
        return not self._is_detailed

    def batch(self, items: list[Any]) -> bytes:
        """Render one event per item that has visible content, joined for one write."""
        if self._is_detailed:
            return b"".join([self._detailed(item) for item in items])
        before, after = self._before, self._after
        out: list[bytes] = []
        for item in items:
            if item.tools is None and item.logprobs is None and not item.reasoning:
                if item.text:
                    out += (before, _encode(item.text), after)
            else:
                out.append(self._rich(item))
        return b"".join(out)

    def _detailed(self, item: Text | PromptPiece) -> bytes:
        """Render the event of one item with the usage so far, or with its token ids.

        The first one is preceded by the opening of the choice.
        """
        if isinstance(item, PromptPiece):
            return self._prompt(item)
        self._chunks.count(self._index, item)
        opening = self._open()
        if item.tools is not None or item.logprobs is not None or item.reasoning:
            return opening + self._rich(item)
        if self._chunks.details.token_ids and item.ids:
            return opening + self._rich(item)
        return opening + (self._chunks.chunk(self._as_dict(item.text)) if item.text else b"")

    def _open(self) -> bytes:
        """Render the opening once, if `start` deferred it until the prompt was counted."""
        if self._opened:
            return b""
        self._opened = True
        return self._opening()

    def start(self) -> bytes:
        """Render the opening, which precedes the first text, unless it is deferred."""
        return self._opening() if self._opened else b""

    def _opening(self) -> bytes:
        return b""

    def finish(self, end: End) -> bytes:
        raise NotImplementedError

    def _as_dict(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _rich(self, item: Text) -> bytes:
        raise NotImplementedError

    def _prompt(self, piece: PromptPiece) -> bytes:
        """Render the event of a piece of the prompt."""
        raise NotImplementedError

    def _ids(self, item: Text) -> dict[str, Any]:
        """Return the field of a choice with the token ids of an item, if they are wanted."""
        return {"token_ids": item.ids} if self._chunks.details.token_ids else {}


# ----------------------------------------------------------------------------------------------------------- chat
class ChatChunks(Chunks):
    object = "chat.completion.chunk"

    def choice(self, index: int) -> Choice:
        return ChatChoice(self, index)


class ChatChoice(Choice):
    def __init__(self, chunks: Chunks, index: int):
        super().__init__(chunks, index)
        self._called_tools = False

    def _opening(self) -> bytes:
        return self._chunks.chunk(
            self._delta({"role": "assistant", "content": "", "refusal": None})
        )

    def finish(self, end: End) -> bytes:
        return self._open() + self._chunks.chunk(
            self._delta({}, finish=chat_finish(end.status, self._called_tools))
        )

    def _as_dict(self, text: str) -> dict[str, Any]:
        return self._delta(self._text_delta(text))

    def _text_delta(self, text: str) -> dict[str, Any]:
        return {"content": text}

    def _rich(self, item: Text) -> bytes:
        deltas = []
        if item.reasoning:
            deltas.append(self._delta({"reasoning_content": item.reasoning}))
        if item.text or item.logprobs:
            logprobs = None if item.logprobs is None else chat_logprobs(item.logprobs)
            deltas.append(self._delta(self._text_delta(item.text), logprobs))
        if item.tools:
            self._called_tools = True
            deltas.append(self._delta({"tool_calls": [tool_delta(tool) for tool in item.tools]}))
        if self._chunks.details.token_ids:
            deltas = deltas or [self._delta({})]
            deltas[0] |= self._ids(item)
        return b"".join([self._chunks.chunk(delta) for delta in deltas])

    def _prompt(self, piece: PromptPiece) -> bytes:
        return self._chunks.chunk(self._delta({}), prompt_token_ids=piece.ids)

    def _delta(
        self,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def tool_delta(tool: ToolCallDelta) -> dict[str, Any]:
    """Render a delta of a tool call.

    The first delta of a call carries id, type and name; later ones carry only arguments.
    """
    if not tool.id and not tool.name:
        return {"index": tool.index, "function": {"arguments": tool.arguments}}
    function = {"name": tool.name, "arguments": tool.arguments}
    return {"index": tool.index, "id": tool.id, "type": "function", "function": function}


def chat_finish(status: str, called_tools: bool) -> str:
    """Return the finish reason: `tool_calls` instead of `stop` after tool calls."""
    return "tool_calls" if called_tools and status == "stop" else status


# ----------------------------------------------------------------------------------------------- plain completions
class CompletionChunks(Chunks):
    object = "text_completion"

    def choice(self, index: int) -> Choice:
        return CompletionChoice(self, index)


class CompletionChoice(Choice):
    def __init__(self, chunks: Chunks, index: int):
        super().__init__(chunks, index)
        self._offset = 0

    def finish(self, end: End) -> bytes:
        return self._chunks.chunk(self._as_dict("", finish=end.status))

    def _as_dict(
        self, text: str, logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _rich(self, item: Text) -> bytes:
        logprobs = None if item.logprobs is None else self._logprobs(entries_of(item.logprobs))
        return self._chunks.chunk({**self._as_dict(item.text, logprobs), **self._ids(item)})

    def _prompt(self, piece: PromptPiece) -> bytes:
        choice = self._as_dict("")
        if piece.logprobs is None:
            return self._chunks.chunk({**choice, "prompt_token_ids": piece.ids})
        echoed = trimmed(piece.logprobs, self._chunks.details.echo_logprobs)
        return self._chunks.chunk({**choice, "logprobs": self._logprobs(echoed)})

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        logprobs = completion_logprobs(entries, self._offset)
        self._offset += sum(len(token) for token in logprobs["tokens"])
        return logprobs


def usage_dict(usage: Usage) -> dict[str, Any]:
    media = {"image_tokens": usage.image_tokens, "audio_tokens": usage.audio_tokens}
    media = {name: count for name, count in media.items() if count}
    guesses = {"accepted": usage.accepted_tokens, "rejected": usage.rejected_tokens}
    guesses = {
        f"{kind}_prediction_tokens": count
        for kind, count in guesses.items()
        if any(guesses.values())
    }
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, **media},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens, **guesses},
    }
