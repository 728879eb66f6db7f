"""Render errors in Anthropic's format."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from motet_gateway.http.problems import ErrorFormat, Problem

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesError(Struct):
    """An error: `code` and `param` are those of OpenAI's format, an extension."""

    type: str
    message: str
    code: str
    param: str | None


class MessagesErrorBody(Struct):
    type: Literal["error"]
    error: MessagesError


def error_body(problem: Problem) -> bytes:
    """Render the body of a refusal."""
    fallback = "invalid_request_error" if problem.status < 500 else "api_error"
    kind = _TYPES.get(problem.status, fallback)
    error = MessagesError(kind, problem.message, problem.code, problem.param)
    return msgspec.json.encode(MessagesErrorBody("error", error))


def error_event(problem: Problem) -> bytes:
    """Render the event of a stream that breaks after its start."""
    return b"event: error\ndata: " + error_body(problem) + b"\n\n"


ERRORS = ErrorFormat(error_body, error_event, MessagesErrorBody)
