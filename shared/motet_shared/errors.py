"""Every error that crosses a process border, as one exception tree.

    MotetError
    ├── ConfigError                 a setting is wrong; the process does not start
    ├── BadRequest                  the caller must change the request
    │   ├── UnknownModel
    │   ├── ContextTooLong
    │   ├── UnsupportedParameter
    │   ├── PayloadTooLarge
    │   ├── MalformedMessage
    │   └── ProtocolMismatch
    ├── Overloaded                  retryable: bounded queues are full
    ├── Unavailable                 retryable: no ready instance
    │   └── Draining                retryable: this instance takes no new work
    ├── StreamBroken                retryable: a stream ended without its End
    │   ├── WorkerLost              the peer is gone or hangs
    │   └── StreamGap               a frame is missing
    ├── DeadlineExceeded
    ├── Cancelled
    ├── BlobError                   a blob cannot be read or written
    └── InternalError               a bug, named by its exception

On the wire an error is the frame `messages.Error{code, message, retryable, param}`; `to_frame_fields` and
`from_wire` convert. The message names the field, the value and the remedy.
"""

from __future__ import annotations


class MotetError(Exception):
    """Base of all errors with a wire code. `retryable` says whether the same request may succeed later."""

    code = "error"
    retryable = False

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(MotetError):
    code = "config"


class BadRequest(MotetError):
    code = "invalid_request"


class UnknownModel(BadRequest):
    code = "model_not_found"


class ContextTooLong(BadRequest):
    code = "context_length_exceeded"


class UnsupportedParameter(BadRequest):
    code = "unsupported_parameter"


class PayloadTooLarge(BadRequest):
    code = "payload_too_large"


class MalformedMessage(BadRequest):
    code = "malformed_message"


class ProtocolMismatch(BadRequest):
    code = "protocol_mismatch"


class Overloaded(MotetError):
    code = "overloaded"
    retryable = True


class Unavailable(MotetError):
    code = "unavailable"
    retryable = True


class Draining(Unavailable):
    code = "draining"


class StreamBroken(MotetError):
    code = "stream_broken"
    retryable = True


class WorkerLost(StreamBroken):
    code = "worker_lost"


class StreamGap(StreamBroken):
    code = "stream_gap"


class DeadlineExceeded(MotetError):
    code = "deadline_exceeded"


class Cancelled(MotetError):
    code = "cancelled"


class BlobError(MotetError):
    code = "blob"


class InternalError(MotetError):
    code = "internal"


def _tree(cls: type[MotetError]) -> list[type[MotetError]]:
    return [cls, *(c for sub in cls.__subclasses__() for c in _tree(sub))]


BY_CODE: dict[str, type[MotetError]] = {cls.code: cls for cls in _tree(MotetError)}


def from_wire(code: str, message: str, retryable: bool = False, param: str | None = None) -> MotetError:
    """The exception for a wire error. An unknown code (a newer peer) becomes a plain MotetError that keeps it."""
    cls = BY_CODE.get(code)
    if cls is not None:
        return cls(message, param=param)
    error = MotetError(message, param=param)
    error.code, error.retryable = code, retryable
    return error


def as_motet_error(error: BaseException) -> MotetError:
    """`error` itself if it has a wire code, else an InternalError that names its type (never its traceback)."""
    if isinstance(error, MotetError):
        return error
    return InternalError(f"{type(error).__name__}: {error}")
