"""Map errors to OpenAI's format: status, body and headers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from motet_shared.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    LoadFailed,
    MotetError,
    Overloaded,
    PayloadTooLarge,
    StreamBroken,
    Unavailable,
    UnknownModel,
    as_motet_error,
)
from motet_shared.wire.subjects import without_names

log = logging.getLogger(__name__)

_LOGGED = 200  # characters of a message that are logged
RETRY_AFTER = 1  # seconds; the header takes whole ones


class Unauthorized(BadRequest):
    code = "invalid_api_key"


class Forbidden(BadRequest):
    code = "forbidden"


class SiteNotAllowed(Forbidden):
    """Signal that the tenant's requests may not be served at the site of this gateway."""

    code = "site_not_allowed"


class ForbiddenOrigin(Forbidden):
    code = "forbidden_origin"


class HostNotAllowed(BadRequest):
    code = "host_not_allowed"


class RateLimited(Overloaded):
    """Signal that a limit of the tenant is reached.

    `kind` is the error's type in the response; `retry_after` is in whole seconds.
    """

    code = "rate_limit_exceeded"

    def __init__(self, message: str, kind: str, retry_after: int):
        super().__init__(message)
        self.kind, self.retry_after = kind, retry_after


class ModelLoading(Unavailable):
    """Signal that a model is loaded on demand, later than the client waits for it.

    `retry_after`: whole seconds until it is expected to be ready.
    """

    code = "model_loading"

    def __init__(self, message: str, retry_after: int):
        super().__init__(message, param="model")
        self.retry_after = retry_after


class QuotaExceeded(BadRequest):
    """Signal that the tenant's stored bytes have reached their limit (`stored_bytes`)."""

    code = "insufficient_quota"


class NotFound(BadRequest):
    code = "not_found"


class WrongModelKind(BadRequest):
    """Signal that the model is served here, but by another endpoint."""

    code = "wrong_model_kind"


class KeyReused(BadRequest):
    """Signal that an `Idempotency-Key` was used for another request."""

    code = "idempotency_error"


class MethodNotAllowed(BadRequest):
    """Signal a wrong method; `allow` lists the path's methods for the `Allow` header."""

    code = "method_not_allowed"

    def __init__(self, message: str, allow: str):
        super().__init__(message)
        self.allow = allow


class RequestTimeout(BadRequest):
    code = "request_timeout"


class HeadTooLarge(BadRequest):
    code = "request_header_fields_too_large"


class TooManyConnections(Unavailable):
    code = "too_many_connections"


# The first class that matches the error decides. Type names are those of OpenAI's public API.
_STATUS: tuple[tuple[type[MotetError], int, str], ...] = (
    (Unauthorized, 401, "invalid_request_error"),
    (Forbidden, 403, "invalid_request_error"),
    (QuotaExceeded, 429, "insufficient_quota"),
    (NotFound, 404, "invalid_request_error"),
    (MethodNotAllowed, 405, "invalid_request_error"),
    (RequestTimeout, 408, "invalid_request_error"),
    (KeyReused, 422, "idempotency_error"),
    (HostNotAllowed, 421, "invalid_request_error"),
    (HeadTooLarge, 431, "invalid_request_error"),
    (UnknownModel, 404, "invalid_request_error"),
    (PayloadTooLarge, 413, "invalid_request_error"),
    (BadRequest, 400, "invalid_request_error"),
    (Overloaded, 429, "rate_limit_error"),
    (Unavailable, 503, "service_unavailable_error"),
    (LoadFailed, 503, "service_unavailable_error"),
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
    allow: str = ""  # methods that the path takes, for status 405

    @classmethod
    def of(cls, error: BaseException) -> Problem:
        """Convert an exception; clients never receive a traceback.

        An unexpected exception is logged with its traceback, and reported by its type and message.
        """
        known = as_motet_error(error)
        if known is not error:
            log.error("unexpected %s", type(error).__name__, exc_info=error)
        status, kind = next(
            ((s, t) for c, s, t in _STATUS if isinstance(known, c)), (500, "server_error")
        )
        if isinstance(known, RateLimited):
            return cls(
                status, known.kind, known.code, known.message, known.param, known.retry_after
            )
        if isinstance(known, ModelLoading):
            return cls(status, kind, known.code, known.message, known.param, known.retry_after)
        allow = known.allow if isinstance(known, MethodNotAllowed) else ""
        return cls(status, kind, known.code, without_names(known.message), known.param, allow=allow)

    def as_dict(self) -> dict[str, str | None]:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.as_dict()})

    def note(self, where: str) -> None:
        """Log why a request is refused (status below 500): code, parameter and message.

        The value that the client sent is left out.
        """
        if self.status < 500:
            why, param = _shown(self.message.partition(" (value ")[0]), _shown(self.param or "")
            extra = {"status": self.status, "code": self.code, "param": param}
            log.info(
                "%s refuses %s (%s): %s", _shown(where), param or "it", self.code, why, extra=extra
            )

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the extra headers of the status, such as `Retry-After` for a temporary error.

        For 413 the connection is closed, since the body was not read.
        """
        extra = {
            405: [(b"allow", self.allow.encode())],
            401: [(b"www-authenticate", b"Bearer")],
            413: [(b"connection", b"close")],
            429: [(b"retry-after", b"%d" % self.retry_after)],
            503: [(b"retry-after", b"%d" % self.retry_after)],
        }
        return extra.get(self.status, [])


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """How a protocol other than OpenAI's shows errors.

    body: of a refusal. event: of a stream that breaks after its start. shape: the struct of the
    body, for the OpenAPI document.
    """

    body: Callable[[Problem], bytes]
    event: Callable[[Problem], bytes]
    shape: type[msgspec.Struct]


def _shown(text: str) -> str:
    """Return the beginning of a text with unprintable characters replaced, for a log line."""
    return "".join(character if character.isprintable() else " " for character in text[:_LOGGED])
