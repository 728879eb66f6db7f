"""Errors in OpenAI's shape: status, body and headers of each."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

from motet_shared.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    MotetError,
    Overloaded,
    PayloadTooLarge,
    StreamBroken,
    Unavailable,
    UnknownModel,
    as_motet_error,
)

log = logging.getLogger(__name__)

RETRY_AFTER = 1  # seconds, in whole ones as the header wants


class Unauthorized(BadRequest):
    code = "invalid_api_key"


class Forbidden(BadRequest):
    code = "forbidden"


class ForbiddenOrigin(Forbidden):
    code = "forbidden_origin"


class RateLimited(Overloaded):
    """A limit of the tenant is reached. `kind`: the type of the error; `retry_after`: whole seconds."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, kind: str, retry_after: int):
        super().__init__(message)
        self.kind, self.retry_after = kind, retry_after


class NotFound(BadRequest):
    code = "not_found"


class MethodNotAllowed(BadRequest):
    code = "method_not_allowed"


# The first class that an error is an instance of decides. Type names are those of the public API.
_STATUS: tuple[tuple[type[MotetError], int, str], ...] = (
    (Unauthorized, 401, "invalid_request_error"),
    (Forbidden, 403, "invalid_request_error"),
    (NotFound, 404, "invalid_request_error"),
    (MethodNotAllowed, 405, "invalid_request_error"),
    (UnknownModel, 404, "invalid_request_error"),
    (PayloadTooLarge, 413, "invalid_request_error"),
    (BadRequest, 400, "invalid_request_error"),
    (Overloaded, 429, "rate_limit_error"),
    (Unavailable, 503, "service_unavailable_error"),
    (StreamBroken, 503, "service_unavailable_error"),
    (DeadlineExceeded, 504, "timeout_error"),
    (Cancelled, 499, "cancelled_error"),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as clients see it."""

    status: int
    type: str
    code: str
    message: str
    param: str | None
    retry_after: int = RETRY_AFTER  # seconds

    @classmethod
    def of(cls, error: BaseException) -> Problem:
        """Never a traceback: an unexpected exception is logged here and shown as its type and message."""
        known = as_motet_error(error)
        if known is not error:
            log.error("unexpected %s", type(error).__name__, exc_info=error)
        status, kind = next(((s, t) for c, s, t in _STATUS if isinstance(known, c)), (500, "server_error"))
        if isinstance(known, RateLimited):
            return cls(status, known.kind, known.code, known.message, known.param, known.retry_after)
        return cls(status, kind, known.code, known.message, known.param)

    def as_dict(self) -> dict[str, str | None]:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.as_dict()})

    def headers(self) -> list[tuple[bytes, bytes]]:
        """`Retry-After` where the same request may succeed later; a body left unread ends the connection."""
        extra = {
            401: [(b"www-authenticate", b"Bearer")],
            413: [(b"connection", b"close")],
            429: [(b"retry-after", b"%d" % self.retry_after)],
            503: [(b"retry-after", b"%d" % self.retry_after)],
        }
        return extra.get(self.status, [])
