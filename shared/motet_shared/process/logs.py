"""Write log lines to stderr as JSON or text, with role, instance and request, without secrets.

Code logs through the standard `logging` module; fields go into `extra=`. `telemetry.setup` installs
this format.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

import msgspec
from opentelemetry import trace

from motet_shared.process.config import ProcessConfig

# The request id of the current task; every log line of the task carries it.
request_id: ContextVar[str] = ContextVar("motet_request_id", default="")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}
_SECRET_NAME = re.compile(
    r"password|passwd|secret|api_?key|authorization|credential|(auth|access)_token", re.IGNORECASE
)
_SECRET_TEXT = re.compile(
    r"(://[^/\s:@\"]*:)[^@/\s\"]+(?=@)|(\bbearer\s+|\bsk-motet-)[\w.~+/=-]+", re.IGNORECASE
)
_HIDDEN = "***"
_SHORTEST_SECRET = 4  # redacting shorter values would damage ordinary words


class Redactor:
    """Redact known secret values, passwords in URLs and bearer tokens in a line of any format."""

    def __init__(self, secrets: Iterable[str] = ()):
        known = {
            form
            for secret in secrets
            if len(secret) >= _SHORTEST_SECRET
            for form in (secret, _escaped(secret))
        }
        self._known = re.compile(
            "|".join(re.escape(form) for form in sorted(known, key=len, reverse=True)) or r"(?!)"
        )

    def __call__(self, line: str) -> str:
        line = self._known.sub(_HIDDEN, line)
        return _SECRET_TEXT.sub(lambda match: f"{match[1] or match[2]}{_HIDDEN}", line)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def secret_values(config: ProcessConfig) -> list[str]:
    """Return the values of all set `secret` fields of `config`; multi-line values are split."""
    fields = [f for f in dataclasses.fields(config) if f.metadata.get("secret")]
    values = [value for f in fields if (value := getattr(config, f.name)) is not None]
    return [line.strip() for value in values for line in str(value).splitlines()]


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the record's `extra` fields; values whose names suggest a secret are redacted."""
    extra = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    return {name: _HIDDEN if _SECRET_NAME.search(name) else value for name, value in extra.items()}


class _Formatter(logging.Formatter):
    def __init__(self, role: str, instance: str, redact: Redactor):
        super().__init__()
        self.role, self.instance, self.redact = role, instance, redact

    def _error_text(self, record: logging.LogRecord) -> str:
        text = self.formatException(record.exc_info) if record.exc_info else ""
        return text + (self.formatStack(record.stack_info) if record.stack_info else "")


class JsonFormatter(_Formatter):
    """Format records as JSON objects, one per line.

    Fields: time (UTC), level, role, instance, logger, message, then request id, trace id, error and
    extra fields if present.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        entry = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "role": self.role,
            "instance": self.instance,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if current := request_id.get():
            entry["request_id"] = current
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            entry["trace_id"] = trace.format_trace_id(context.trace_id)
        if error := self._error_text(record):
            entry["error"] = error
        return self.redact(_to_json({**_fields(record), **entry}))


def _to_json(entry: dict[str, Any]) -> str:
    # A log line must never fail: values that JSON cannot represent are logged as their repr.
    try:
        return msgspec.json.encode(entry, enc_hook=repr).decode()
    except (TypeError, ValueError, RecursionError):
        return json.dumps({str(key): repr(value) for key, value in entry.items()})


class TextFormatter(_Formatter):
    """Format records as `time LEVEL instance [request] message key=value`.

    Tracebacks follow on the next lines.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text."""
        clock = (
            f"{time.strftime('%H:%M:%S', time.localtime(record.created))}.{int(record.msecs):03d}"
        )
        parts = [clock, f"{record.levelname:<7}", self.instance]
        if current := request_id.get():
            parts.append(f"[{current}]")
        parts.append(record.getMessage())
        parts += [f"{name}={value}" for name, value in _fields(record).items()]
        error = self._error_text(record)
        return self.redact(" ".join(parts) + (f"\n{error}" if error else ""))


def install(role: str, instance: str, config: ProcessConfig) -> None:
    """Make stderr, in the configured format and level, the root logger's only output.

    It may be called again.
    """
    formatter = TextFormatter if config.log_format == "text" else JsonFormatter
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(role, instance, Redactor(secret_values(config))))
    logging.basicConfig(handlers=[handler], level=config.log_level.upper(), force=True)
    quiet_libraries(logging.getLogger().level)
    logging.getLogger("asyncio").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for what asyncio says of every TLS connection to NATS that the server ends."""
    return "eof_received() has no effect when using ssl" not in record.getMessage()


def quiet_libraries(level: int) -> None:
    """Suppress warnings of transformers and diffusers, unless `level` is DEBUG or lower.

    Both write to stderr with their own handlers, past the root logger: the environment variable
    sets the level of a library that is imported later, `setLevel` that of one that was imported
    before.
    """
    least = "warning" if level <= logging.DEBUG else "error"
    for library in ("transformers", "diffusers"):
        os.environ.setdefault(f"{library.upper()}_VERBOSITY", least)
        logging.getLogger(library).setLevel(os.environ[f"{library.upper()}_VERBOSITY"].upper())
