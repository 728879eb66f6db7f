"""Convert what a server answers instead of a reply to errors of the wire."""

from __future__ import annotations

from typing import Any

import msgspec

from motet_shared.errors import (
    BY_CODE,
    BadRequest,
    ContextTooLong,
    MotetError,
    Overloaded,
    Unavailable,
    UnsupportedParameter,
)

_SHOWN = 400  # characters of a server's message


def of_response(status: int, body: bytes) -> MotetError:
    """Return the error of a response whose status is not 200."""
    try:
        document = msgspec.json.decode(body)
    except msgspec.DecodeError:
        document = None
    detail = _detail(document) or {"message": body[:_SHOWN].decode("utf-8", "replace")}
    return _error(status, detail)


def of_event(detail: Any) -> MotetError:
    """Return the error of an event in a stream, which has no status of its own."""
    detail = detail if isinstance(detail, dict) else {"message": str(detail)}
    code = detail.get("code")
    if isinstance(code, int):
        return _error(code, detail)
    known = BY_CODE.get(str(code))
    if known is not None and issubclass(known, BadRequest):
        return _error(400, detail)
    return Unavailable(f"the engine's server broke a reply off: {_message(detail)}")


def _detail(document: Any) -> dict[str, Any] | None:
    if not isinstance(document, dict):
        return None
    detail = document.get("error", document)
    return detail if isinstance(detail, dict) else {"message": str(detail)}


def _message(detail: dict[str, Any]) -> str:
    found = detail.get("message") or detail.get("detail") or "no message"
    return str(found)[:_SHOWN]


def _error(status: int, detail: dict[str, Any]) -> MotetError:
    message = f"the engine's server answers {status}: {_message(detail)}"
    if status in (429, 503):
        return Overloaded(message)
    if status in (400, 404, 413, 422):
        param = detail.get("param")
        kind = {
            "context_length_exceeded": ContextTooLong,
            "unsupported_parameter": UnsupportedParameter,
        }.get(str(detail.get("code")), BadRequest)
        return kind(message, param=param if isinstance(param, str) else None)
    if status in (401, 403):
        return Unavailable(f"{message}; give the server's key as engine_key")
    return Unavailable(message)
