"""Render whole JSON bodies of the chat and completion endpoints: what `render.py` streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from motet_shared.messages import End, Text, TextLogprob, Usage

from .render import chat_finish, chat_logprobs, completion_logprobs, usage_dict


@dataclass(slots=True)
class Collected:
    """Collect the items of one choice."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tools: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: list[TextLogprob] | None = None
    images: list[dict[str, Any]] = field(default_factory=list)
    end: End | None = None

    def add(self, items: list[Text]) -> None:
        for item in items:
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
        reasoning_tokens=sum(usage.reasoning_tokens for usage in known),
        accepted_tokens=sum(usage.accepted_tokens for usage in known),
        rejected_tokens=sum(usage.rejected_tokens for usage in known),
    )


def chat_result(
    response_id: str, created: int, model: str, choices: list[Collected], usage: Usage
) -> bytes:
    """Render the body of a chat completion that is not streamed."""
    return _body(
        response_id,
        "chat.completion",
        created,
        model,
        [*map(_chat_choice, range(len(choices)), choices)],
        usage,
    )


def completion_result(
    response_id: str, created: int, model: str, choices: list[Collected], usage: Usage
) -> bytes:
    """Render the body of a plain completion that is not streamed."""
    shaped = [_completion_choice(index, choice) for index, choice in enumerate(choices)]
    return _body(response_id, "text_completion", created, model, shaped, usage)


def _body(
    response_id: str,
    kind: str,
    created: int,
    model: str,
    choices: list[dict[str, Any]],
    usage: Usage,
) -> bytes:
    head = {"id": response_id, "object": kind, "created": created, "model": model}
    return msgspec.json.encode({**head, "choices": choices, "usage": usage_dict(usage)})


def _chat_choice(index: int, choice: Collected) -> dict[str, Any]:
    calls = [choice.tools[key] for key in sorted(choice.tools)]
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if reasoning := "".join(choice.reasoning):
        message["reasoning_content"] = reasoning
    if calls:
        message["content"] = choice.text or None
        message["tool_calls"] = calls
    if choice.images:
        message["images"] = choice.images
    logprobs = None if choice.logprobs is None else chat_logprobs(choice.logprobs)
    finish = chat_finish(choice.status, bool(calls))
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}


def _completion_choice(index: int, choice: Collected) -> dict[str, Any]:
    logprobs = None if choice.logprobs is None else completion_logprobs(choice.logprobs)
    return {
        "index": index,
        "text": choice.text,
        "logprobs": logprobs,
        "finish_reason": choice.status,
    }
