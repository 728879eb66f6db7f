"""Server-sent events of the chat and completion endpoints, pre-rendered.

All of an event but the text is the same for every token of a choice, so it is rendered once and only the text is
encoded per token: this is the gateway's hot path. Whole JSON bodies are in `results.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from motet_shared.messages import End, Text, TextLogprob, ToolCallDelta, Usage

from .problems import Problem

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
_MARK = "\x00text\x00"
_MARK_JSON = _encode(_MARK)


def event(data: Any) -> bytes:
    return b"data: " + _encode(data) + b"\n\n"


def error_event(problem: Problem) -> bytes:
    """What a client gets when a stream breaks after its start: the SDKs raise on a top-level `error`."""
    return event({"error": problem.as_dict()})


class Chunks:
    """Renders the events of one response. Its choices share id, time and model; a subclass knows the shape."""

    object: str

    def __init__(self, response_id: str, created: int, model: str, include_usage: bool = False):
        self._head = {"id": response_id, "object": self.object, "created": created, "model": model}
        self._usage: dict[str, Any] = {"usage": None} if include_usage else {}
        self.include_usage = include_usage

    def choice(self, index: int) -> Choice:
        """The renderer of one choice's events; it keeps that choice's state."""
        raise NotImplementedError

    def chunk(self, choice: dict[str, Any]) -> bytes:
        return event({**self._head, "choices": [choice], **self._usage})

    def usage(self, usage: Usage, timing: dict[str, float]) -> bytes:
        """The event before [DONE] that carries the usage of all choices, if it was asked for.

        `timing`: seconds by `<role>.<stage>`, a member beyond OpenAI's; a body that is not streamed has the header
        `Server-Timing` for it.
        """
        if not self.include_usage:
            return b""
        return event({**self._head, "choices": [], "usage": usage_dict(usage), "timing": timing})

    def split(self, choice: dict[str, Any]) -> tuple[bytes, bytes]:
        """What stands before and after the encoded text in an event whose text is `_MARK`."""
        before, _, after = self.chunk(choice).partition(_MARK_JSON)
        return before, after


class Choice:
    """The events of one choice: `batch` for what has arrived, `finish` once at the end."""

    def __init__(self, chunks: Chunks, index: int):
        self._chunks = chunks
        self._index = index
        self._before, self._after = chunks.split(self._shape(_MARK))

    def batch(self, items: list[Text]) -> bytes:
        """One event per item that shows something, joined for one write."""
        before, after = self._before, self._after
        out: list[bytes] = []
        for item in items:
            if item.tools is None and item.logprobs is None:
                if item.text:
                    out += (before, _encode(item.text), after)
            else:
                out.append(self._rich(item))
        return b"".join(out)

    def start(self) -> bytes:
        """What precedes the first text."""
        return b""

    def finish(self, end: End) -> bytes:
        raise NotImplementedError

    def _shape(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _rich(self, item: Text) -> bytes:
        raise NotImplementedError


# ----------------------------------------------------------------------------------------------------------- chat
class ChatChunks(Chunks):
    object = "chat.completion.chunk"

    def choice(self, index: int) -> Choice:
        return ChatChoice(self, index)


class ChatChoice(Choice):
    def __init__(self, chunks: Chunks, index: int):
        super().__init__(chunks, index)
        self._called_tools = False

    def start(self) -> bytes:
        return self._chunks.chunk(self._delta({"role": "assistant", "content": "", "refusal": None}))

    def finish(self, end: End) -> bytes:
        return self._chunks.chunk(self._delta({}, finish=chat_finish(end.status, self._called_tools)))

    def _shape(self, text: str) -> dict[str, Any]:
        return self._delta({"content": text})

    def _rich(self, item: Text) -> bytes:
        out = []
        if item.text or item.logprobs:
            logprobs = None if item.logprobs is None else chat_logprobs(item.logprobs)
            out.append(self._chunks.chunk(self._delta({"content": item.text}, logprobs)))
        if item.tools:
            self._called_tools = True
            out.append(self._chunks.chunk(self._delta({"tool_calls": [tool_delta(tool) for tool in item.tools]})))
        return b"".join(out)

    def _delta(
        self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def tool_delta(tool: ToolCallDelta) -> dict[str, Any]:
    """The first delta of a call carries id, type and name; the later ones only arguments."""
    if not tool.id and not tool.name:
        return {"index": tool.index, "function": {"arguments": tool.arguments}}
    function = {"name": tool.name, "arguments": tool.arguments}
    return {"index": tool.index, "id": tool.id, "type": "function", "function": function}


def chat_finish(status: str, called_tools: bool) -> str:
    """The finish reason: a reply that ends by itself after calling tools says so."""
    return "tool_calls" if called_tools and status == "stop" else status


def chat_logprobs(logprobs: list[TextLogprob]) -> dict[str, Any]:
    return {"content": [_logprob_entry(entry) for entry in logprobs], "refusal": None}


def _logprob_entry(entry: TextLogprob) -> dict[str, Any]:
    return {**_token(entry.token, entry.logprob), "top_logprobs": [_token(token, value) for token, value in entry.top]}


def _token(token: bytes, logprob: float) -> dict[str, Any]:
    # A token may be part of a character: `bytes` is then the only exact form.
    return {"token": token.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(token)}


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
        return self._chunks.chunk(self._shape("", finish=end.status))

    def _shape(self, text: str, logprobs: dict[str, Any] | None = None, finish: str | None = None) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _rich(self, item: Text) -> bytes:
        logprobs = completion_logprobs(item.logprobs or [], self._offset)
        self._offset += sum(len(token) for token in logprobs["tokens"])
        return self._chunks.chunk(self._shape(item.text, logprobs))


def completion_logprobs(logprobs: list[TextLogprob], offset: int = 0) -> dict[str, Any]:
    """The older form: parallel lists. `offset`: characters of the tokens before these."""
    tokens, offsets = [], []
    for entry in logprobs:
        tokens.append(entry.token.decode("utf-8", "replace"))
        offsets.append(offset)
        offset += len(tokens[-1])
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in logprobs],
        "top_logprobs": [{t.decode("utf-8", "replace"): value for t, value in entry.top} for entry in logprobs],
        "text_offset": offsets,
    }


def usage_dict(usage: Usage) -> dict[str, Any]:
    images = {"image_tokens": usage.image_tokens} if usage.image_tokens else {}
    guesses = {"accepted": usage.accepted_tokens, "rejected": usage.rejected_tokens}
    guesses = {f"{kind}_prediction_tokens": count for kind, count in guesses.items() if any(guesses.values())}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, **images},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens, **guesses},
    }
