"""Render errors in Ollama's format: a message, as a body or as the last line of a stream."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from motet_gateway.http.problems import ErrorFormat, Problem


class OllamaError(Struct):
    """An error: `code` and `param` are those of OpenAI's format, an extension."""

    error: str
    code: str
    param: str | None


def error_body(problem: Problem) -> bytes:
    """Render the body of a refusal."""
    return msgspec.json.encode(OllamaError(problem.message, problem.code, problem.param))


def error_line(problem: Problem) -> bytes:
    """Render the last line of a stream that breaks after its start."""
    return error_body(problem) + b"\n"


ERRORS = ErrorFormat(error_body, error_line, OllamaError)
