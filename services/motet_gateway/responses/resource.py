"""Make the response object: what is answered, stored, and shown by the events of a stream."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from motet_gateway.http.problems import Problem
from motet_gateway.kept import draws
from motet_shared.messages import Usage, tier_of

from .schema import ReasoningOptions, ResponseBody, TextOptions
from .tools import echoed, echoed_choice

Resource = dict[str, Any]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
OVER = ("completed", "incomplete", "failed", "cancelled")


def new_id() -> str:
    """Return the id of a new response."""
    return "resp_" + draws.token_hex(24)


def new_resource(body: ResponseBody, priority: int, *, stored: bool) -> Resource:
    """Return a response that has no output yet. `body.model` is the served model."""
    return {
        "id": new_id(),
        "object": "response",
        "created_at": draws.now(),
        "status": "queued" if body.background else "in_progress",
        "completed_at": None,
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "service_tier": tier_of(priority),
        "store": stored,
        "truncation": body.truncation or "disabled",
        "usage": None,
        **_sampling(body),
        **_choices(body),
        **_records(body),
    }


def _sampling(body: ResponseBody) -> Resource:
    return {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
    }


def _choices(body: ResponseBody) -> Resource:
    reasoning = msgspec.to_builtins(body.reasoning or ReasoningOptions())
    text = msgspec.to_builtins(body.text or TextOptions())
    return {
        "reasoning": {"effort": None, "summary": None, **reasoning},
        "text": {"format": {"type": "text"}, "verbosity": "medium", **text},
        "tools": [echoed(tool) for tool in body.tools or ()],
        "tool_choice": echoed_choice(body.tool_choice),
    }


def _records(body: ResponseBody) -> Resource:
    """Return what the client sent for its own records."""
    return {
        "metadata": body.metadata or {},
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }


# ---------------------------------------------------------------------------------------- the end
def ended(resource: Resource, finish: str, output: list[Resource], usage: Usage | None) -> Resource:
    """Return the response after its end; `finish` is the chat's finish reason."""
    is_cut = finish == "length"
    return {
        **resource,
        "status": "incomplete" if is_cut else "completed",
        "completed_at": None if is_cut else int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output,
        "usage": usage_of(usage) if usage is not None else None,
    }


def failed(resource: Resource, problem: Problem, output: list[Resource]) -> Resource:
    """Return the response after an error."""
    code = {429: "rate_limit_exceeded"}.get(problem.status, "server_error")
    if problem.status < 429:
        code = "invalid_prompt"
    error = {
        "code": code,
        "message": problem.message,
        "param": problem.param,
        "type": problem.type,
    }
    return {**resource, "status": "failed", "error": error, "output": output}


def cancelled(resource: Resource, output: list[Resource]) -> Resource:
    return {**resource, "status": "cancelled", "output": output}


def usage_of(usage: Usage) -> Resource:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
