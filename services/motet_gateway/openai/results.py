"""Render whole JSON bodies of the chat and completion endpoints: what `render.py` streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from motet_shared.messages import End, PromptLogprob, PromptPiece, TextLogprob, Usage

from .logprobs import chat_logprobs, completion_logprobs, entries_of, prompt_logprobs, trimmed
from .render import chat_finish, usage_dict
from .reply_details import NO_DETAILS, ReplyDetails


@dataclass(slots=True)
class Collected:
    """Collect the items of one choice."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tools: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: list[TextLogprob] | None = None
    images: list[dict[str, Any]] = field(default_factory=list)
    audio: dict[str, Any] | None = None  # of a spoken choice, whose text is its transcript
    ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    scored_ids: list[int] = field(default_factory=list)  # tokens of `prompt`
    prompt: list[PromptLogprob] = field(default_factory=list)
    end: End | None = None

    def add(self, items: list[Any]) -> None:
        for item in items:
            if isinstance(item, PromptPiece):
                self._add_prompt(item)
                continue
            self.ids += item.ids
            self.texts.append(item.text)
            self.reasoning.append(item.reasoning)
            if item.logprobs is not None:
                self.logprobs = (self.logprobs or []) + item.logprobs
            for tool in item.tools or ():
                call = self.tools.setdefault(
                    tool.index,
                    {"id": "", "type": "function", "function": {"name": "", "arguments": ""}},
                )
                call["id"] += tool.id
                call["function"]["name"] += tool.name
                call["function"]["arguments"] += tool.arguments

    def _add_prompt(self, piece: PromptPiece) -> None:
        if piece.logprobs is None:
            self.prompt_ids = piece.ids
        else:
            self.scored_ids += piece.ids
            self.prompt += piece.logprobs

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def status(self) -> str:
        return self.end.status if self.end is not None else "stop"


def add_usage(ends: list[End | None], prompts: int = 1) -> Usage:
    """Return the usage of one response; a prompt shared by several choices counts once."""
    known = [end.usage for end in ends if end is not None and end.usage is not None]
    share = max(len(ends) // prompts, 1)
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in known[::share]),
        completion_tokens=sum(usage.completion_tokens for usage in known),
        cached_tokens=sum(usage.cached_tokens for usage in known[::share]),
        image_tokens=sum(usage.image_tokens for usage in known[::share]),
        audio_tokens=sum(usage.audio_tokens for usage in known[::share]),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in known),
        accepted_tokens=sum(usage.accepted_tokens for usage in known),
        rejected_tokens=sum(usage.rejected_tokens for usage in known),
    )


def chat_result(
    response_id: str,
    created: int,
    model: str,
    choices: list[Collected],
    usage: Usage,
    *,
    details: ReplyDetails = NO_DETAILS,
) -> bytes:
    """Render the body of a chat completion that is not streamed; its choices share a prompt."""
    shaped = [_chat_choice(index, choice, details) for index, choice in enumerate(choices)]
    fields = _prompt_fields(choices[0], details) if choices else {}
    return _body(response_id, "chat.completion", created, model, shaped, usage, fields)


def completion_result(
    response_id: str,
    created: int,
    model: str,
    choices: list[Collected],
    usage: Usage,
    *,
    details: ReplyDetails = NO_DETAILS,
) -> bytes:
    """Render the body of a plain completion that is not streamed."""
    shaped = [_completion_choice(index, choice, details) for index, choice in enumerate(choices)]
    return _body(response_id, "text_completion", created, model, shaped, usage, {})


def _prompt_fields(choice: Collected, details: ReplyDetails) -> dict[str, Any]:
    """Return the fields about the prompt that were requested, as vLLM names them."""
    fields: dict[str, Any] = {}
    if details.token_ids:
        fields["prompt_token_ids"] = choice.prompt_ids
    if (most := details.prompt_logprobs) >= 0:
        fields["prompt_logprobs"] = prompt_logprobs(choice.prompt, choice.scored_ids, most)
    return fields


def _body(
    response_id: str,
    kind: str,
    created: int,
    model: str,
    choices: list[dict[str, Any]],
    usage: Usage,
    fields: dict[str, Any],
) -> bytes:
    head = {"id": response_id, "object": kind, "created": created, "model": model}
    return msgspec.json.encode({**head, "choices": choices, "usage": usage_dict(usage), **fields})


def _chat_choice(index: int, choice: Collected, details: ReplyDetails) -> dict[str, Any]:
    calls = [choice.tools[key] for key in sorted(choice.tools)]
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if reasoning := "".join(choice.reasoning):
        message["reasoning_content"] = reasoning
    if calls:
        message["content"] = choice.text or None
        message["tool_calls"] = calls
    if choice.images:
        message["images"] = choice.images
    if choice.audio is not None:
        message["content"], message["audio"] = None, choice.audio
    logprobs = None if choice.logprobs is None else chat_logprobs(choice.logprobs)
    finish = chat_finish(choice.status, bool(calls))
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish,
        **({"token_ids": choice.ids} if details.token_ids else {}),
    }


def _completion_choice(index: int, choice: Collected, details: ReplyDetails) -> dict[str, Any]:
    return {
        "index": index,
        "text": choice.text,
        "logprobs": _completion_logprobs(choice, details),
        "finish_reason": choice.status,
        **_prompt_fields(choice, details),
        **({"token_ids": choice.ids} if details.token_ids else {}),
    }


def _completion_logprobs(choice: Collected, details: ReplyDetails) -> dict[str, Any] | None:
    entries = None if choice.logprobs is None else entries_of(choice.logprobs)
    if details.echo_logprobs >= 0:
        entries = [*trimmed(choice.prompt, details.echo_logprobs), *(entries or [])]
    return None if entries is None else completion_logprobs(entries)
