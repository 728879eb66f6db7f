"""Read the tenants file: which keys may use a server, and with which limits.

    [tenants.acme]
    requests_per_minute = 600
    tokens_per_minute = 100_000
    concurrent_streams = 16

    [[keys]]
    tenant = "acme"
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

Only the digest of a key is stored: 32 random bytes need no slow hash, and reading the file reveals
no key. The gateway enforces the limits; `motet keys` creates and revokes keys.
"""

from __future__ import annotations

import datetime
import hashlib
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec
from msgspec import Meta, Struct

from .errors import ConfigError
from .wire import sites

T = TypeVar("T", bound=Struct)
Tier = Literal["flex", "default", "priority"]

PREFIX = "sk-motet-"  # marks keys for log redaction and for readers
DEFAULT = "default"  # tenant of keys that have none
ID_LENGTH = 12  # digits of the digest that serve as a key's id
STORED_BYTES = 1 << 30  # default of a tenant's stored_bytes; no other limit has a default
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_Positive = Annotated[int, Meta(ge=1)]
_Count = Annotated[int, Meta(ge=0)]
_Site = Annotated[str, Meta(pattern=sites.PATTERN)]


class TenantLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one tenant; None: unlimited.

    A limit per minute or hour is a token bucket: it may be spent at once and refills evenly. Tokens
    are those of prompts and replies, audio seconds those heard and spoken, `max_context` the tokens
    of one prompt with its reply, `service_tier` the highest tier that may be requested.
    `sites` are those at which its work may be done, at every stage (`--site` of a process).
    `stored_bytes` limits the pictures and jobs that are stored at a time. `metrics`: its keys may
    read /metrics, which covers all tenants.
    """

    requests_per_minute: _Positive | None = None
    tokens_per_minute: _Positive | None = None
    concurrent_streams: _Positive | None = None
    concurrent_sockets: _Positive | None = None
    images_per_hour: _Count | None = None
    audio_seconds_per_hour: _Count | None = None
    max_context: _Positive | None = None
    stored_bytes: _Count = STORED_BYTES
    service_tier: Tier = "priority"
    sites: Annotated[tuple[_Site, ...], Meta(min_length=1)] | None = None
    metrics: bool = False


class TenantKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identify a tenant by the digest of a key."""

    tenant: str
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    created: datetime.date | None = None
    note: str = ""

    @property
    def id(self) -> str:
        """Return the first digits of the digest, which identify the key."""
        return self.sha256[:ID_LENGTH]


@dataclass(frozen=True, slots=True)
class Tenants:
    """Contents of a tenants file."""

    limits: Mapping[str, TenantLimits]
    keys: tuple[TenantKey, ...]


def new_key() -> str:
    """Return a new key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def digest(key: str) -> str:
    """Return the SHA-256 hex digest of a key, as stored in the file."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def check_name(name: str) -> None:
    """Raise ConfigError if `name` is not a valid name of a tenant."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"tenant: {name!r} is no name; use a-z, 0-9, _ and -, at most 63, a letter or digit first"
        )
    if name == DEFAULT:
        raise ConfigError(f"tenant: {name!r} is the one of --api-key-file; choose another name")


def load_tenants(path: Path) -> Tenants:
    """Read the file at `path`.

    Raises ConfigError (param "tenants_file") that names line, field and remedy.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        message = f"tenants_file: cannot read {str(path)!r}: {error}; make one with `motet keys new TENANT`"
        raise ConfigError(message, param="tenants_file") from None
    return parse_tenants(text, str(path))


def parse_tenants(text: str, path: str) -> Tenants:
    """Parse the text of a tenants file; `path` is for errors. Raises as `load_tenants`."""
    return _Reader(text, path).read()


class _Reader:
    """Parse one file and locate its fields by line for errors."""

    def __init__(self, text: str, path: str):
        self._lines, self._text, self._path = text.splitlines(), text, path

    def read(self) -> Tenants:
        try:
            document = tomllib.loads(self._text)
        except tomllib.TOMLDecodeError as error:
            found = re.search(r"line (\d+)", str(error))
            self._refuse(
                f"is no TOML: {error}; correct it there",
                int(found[1]) if found else len(self._lines),
            )
        for name in document.keys() - {"tenants", "keys"}:
            line = self._line(rf"\s*(\[+\s*)?{re.escape(name)}\b")
            self._refuse(f"`{name}` is unknown; write [tenants.NAME] and [[keys]]", line)
        limits = self._limits(document.get("tenants", {}))
        return Tenants(limits, self._keys(document.get("keys", []), limits))

    def _limits(self, tables: Any) -> dict[str, TenantLimits]:
        if not isinstance(tables, dict) or not all(
            isinstance(table, dict) for table in tables.values()
        ):
            self._refuse(
                "`tenants` holds no tables; write [tenants.NAME]", self._line(r"\s*\[?tenants\b")
            )
        limits = {}
        for name, table in tables.items():
            header = self._line(rf"\s*\[\s*tenants\s*\.\s*[\"']?{re.escape(name)}[\"']?\s*\]")
            try:
                check_name(name)
            except ConfigError as error:
                self._refuse(error.message, header)
            limits[name] = self._convert(table, TenantLimits, f"tenants.{name}", header)
        return limits

    def _keys(self, entries: Any, limits: Mapping[str, TenantLimits]) -> tuple[TenantKey, ...]:
        if not isinstance(entries, list):
            self._refuse("`keys` is no list of tables; write [[keys]]", self._line(r"\s*\[?keys\b"))
        headers = [
            n for n, line in enumerate(self._lines, 1) if re.match(r"\s*\[\[\s*keys\s*\]\]", line)
        ]
        keys: dict[str, TenantKey] = {}
        for index, entry in enumerate(entries):
            header = headers[index] if index < len(headers) else 1
            key = self._convert(entry, TenantKey, f"keys[{index}]", header)
            if key.tenant not in limits:
                line = self._field_line("tenant", header)
                self._refuse(
                    f"`keys[{index}].tenant`: there is no [tenants.{key.tenant}]; add it", line
                )
            if key.sha256 in keys:
                line = self._field_line("sha256", header)
                self._refuse(f"`keys[{index}].sha256` is there twice ({key.id}…); remove one", line)
            keys[key.sha256] = key
        return tuple(keys.values())

    def _convert(self, table: Any, kind: type[T], where: str, header: int) -> T:
        try:
            return msgspec.convert(table, kind)
        except msgspec.ValidationError as error:
            message = str(error)
            quoted = re.search(
                r"(?:`\$\.|unknown field `|required field `)(\w+)(?:\[[^`]*\])?`", message
            )
            field = quoted[1] if quoted else ""
            what = message.partition(" - at")[0]
            if "unknown field" in message:
                what = f"unknown; there are: {', '.join(kind.__struct_fields__)}"
            self._refuse(f"`{where}.{field}`: {what}", self._field_line(field, header))

    def _line(self, pattern: str) -> int:
        """Return the number of the first matching line; 1 if none matches."""
        return next(
            (number for number, line in enumerate(self._lines, 1) if re.match(pattern, line)), 1
        )

    def _field_line(self, field: str, header: int) -> int:
        """Return the line of a field in the table that begins in line `header`, else `header`."""
        for number, line in enumerate(self._lines[header:], header + 1):
            if line.lstrip().startswith("["):
                break
            if field and re.match(rf"\s*{re.escape(field)}\s*=", line):
                return number
        return header

    def _refuse(self, what: str, line: int) -> NoReturn:
        raise ConfigError(f"tenants_file: {self._path}, line {line}: {what}", param="tenants_file")
