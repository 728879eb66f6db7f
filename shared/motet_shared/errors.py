"""Define every error that crosses a process boundary, as one exception tree.

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
    │   ├── Draining                retryable: this instance takes no new work
    │   └── NoAllowedSite           retryable: no ready instance at the tenant's sites
    ├── StreamBroken                retryable: a stream ended without its End
    │   ├── WorkerLost              the peer is gone or hangs
    │   └── StreamGap               a frame is missing
    ├── LoadFailed                  a model that is loaded on demand cannot be started
    ├── DeadlineExceeded
    ├── Cancelled
    ├── BlobError                   a blob cannot be read or written
    └── InternalError               a bug, named by its exception

On the wire an error is the frame `messages.Error{code, message, retryable, param}`; `from_wire`
converts it back. The message names the field, the value and the remedy.
"""

from __future__ import annotations

import errno
import re

# The setting at the beginning of a message: `name=value: remedy`, `name: problem`, `--name: …`.
_SETTING = re.compile(r"(?:--)?(\w[\w.-]*(?:\[\w+\])?)[:=]")


class MotetError(Exception):
    """Report a failure with a wire code; the base of all errors that cross a process boundary.

    message: names the field, its value and the remedy.
    param: the field of the request, or the setting, that has to change; None: no single one.
    retryable: the same request may succeed later.
    """

    code = "error"
    retryable = False

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(MotetError):
    """Report a wrong setting; the process does not start.

    param: the setting; by default the one that the message begins with, None without one.
    """

    code = "config"

    def __init__(self, message: str, *, param: str | None = None):
        named = _SETTING.match(message)
        super().__init__(message, param=param or (named[1] if named else None))


class BadRequest(MotetError):
    """Report a request that the caller must change."""

    code = "invalid_request"


class UnknownModel(BadRequest):
    """Report a model that is not served."""

    code = "model_not_found"


class ContextTooLong(BadRequest):
    """Report a prompt that exceeds the context length."""

    code = "context_length_exceeded"


class UnsupportedParameter(BadRequest):
    """Report a parameter that is not supported."""

    code = "unsupported_parameter"


class PayloadTooLarge(BadRequest):
    """Report a message or upload over its size limit."""

    code = "payload_too_large"


class MalformedMessage(BadRequest):
    """Report a message that cannot be decoded."""

    code = "malformed_message"


class ProtocolMismatch(BadRequest):
    """Report a peer with another protocol version."""

    code = "protocol_mismatch"


class Overloaded(MotetError):
    """Report full queues; retryable."""

    code = "overloaded"
    retryable = True


class Unavailable(MotetError):
    """Report that no instance is ready; retryable."""

    code = "unavailable"
    retryable = True


class Draining(Unavailable):
    """Report an instance that takes no new work; retryable."""

    code = "draining"


class NoAllowedSite(Unavailable):
    """Report that no instance is ready at the sites to which a tenant is limited; retryable."""

    code = "no_allowed_site"


class StreamBroken(MotetError):
    """Report a stream that ended without its End; retryable."""

    code = "stream_broken"
    retryable = True


class WorkerLost(StreamBroken):
    """Report a peer that is gone or hangs."""

    code = "worker_lost"


class StreamGap(StreamBroken):
    """Report a missing frame of a stream."""

    code = "stream_gap"


class LoadFailed(MotetError):
    """Report a model that is loaded on demand and cannot be started; waiting would not help."""

    code = "model_load_failed"


class DeadlineExceeded(MotetError):
    """Report a stream that was not complete by its deadline."""

    code = "deadline_exceeded"


class Cancelled(MotetError):
    """Report work that was cancelled."""

    code = "cancelled"


class BlobError(MotetError):
    """Report a blob that cannot be read or written."""

    code = "blob"


class InternalError(MotetError):
    """Report a bug, named by its exception."""

    code = "internal"


def _tree(cls: type[MotetError]) -> list[type[MotetError]]:
    return [cls, *(c for sub in cls.__subclasses__() for c in _tree(sub))]


BY_CODE: dict[str, type[MotetError]] = {cls.code: cls for cls in _tree(MotetError)}


def from_wire(
    code: str, message: str, retryable: bool = False, param: str | None = None
) -> MotetError:
    """Return the exception for a wire error.

    An unknown code (from a newer peer) becomes a plain MotetError with that code.
    """
    cls = BY_CODE.get(code)
    if cls is not None:
        return cls(message, param=param)
    error = MotetError(message, param=param)
    error.code, error.retryable = code, retryable
    return error


def as_motet_error(error: BaseException) -> MotetError:
    """Return `error` itself if it has a wire code, else one for its kind.

    Overloaded if this process has no memory for it, which another process or a later time has; else
    an InternalError with its type's name. Its message never includes the traceback, which is that of
    its cause.
    """
    if isinstance(error, MotetError):
        return error
    known: MotetError
    if _lacks_memory(error):
        known = Overloaded(f"memory: the process has none left ({error}); try again")
    else:
        known = InternalError(f"{type(error).__name__}: {error}")
    known.__cause__ = error
    return known


def model_error(error: Exception, outcome: str) -> InternalError:
    """Return the error of work whose model raised `error`, which is its cause and logged with it.

    outcome: what becomes of the work, such as "the sentence ends".
    """
    raised = InternalError(f"the model raised {type(error).__name__}; {outcome}")
    raised.__cause__ = error
    return raised


def _lacks_memory(error: BaseException) -> bool:
    """Return True if the system refused this process memory, be it that of a thread's stack."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    )
