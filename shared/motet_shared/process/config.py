"""Load the settings of a process into a frozen dataclass from flags, environment and defaults.

    @dataclass(frozen=True, kw_only=True)
    class TokenizerConfig(ProcessConfig):
        threads: int = setting("encoder threads", default=2, min=1)
        api_key: str | None = setting("key of the clients", default=None, secret=True)

    config = load(TokenizerConfig)      # --threads 4, or MOTET_THREADS=4

A flag overrides the environment, which overrides the default; an empty variable counts as not set.
A `secret` field may also be read from a file: `--api-key-file PATH` or `MOTET_API_KEY_FILE=PATH`;
its value appears in no message and no repr. Types: str, int, float, bool, Path, Literal, `X | None`
(the word "none"), tuples and lists of these (the flag repeats, the variable is comma-separated),
`Bytes` and `Duration`. The services that define settings validate their meaning.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union

from motet_shared.errors import ConfigError
from motet_shared.peer_tls import PeerTls, peer_tls
from motet_shared.wire import subjects

T = TypeVar("T")
_MISSING: Any = dataclasses.MISSING
_HIDDEN = "(hidden)"


# ------------------------------------------------------------------------------- units and settings
@dataclass(frozen=True, eq=False)
class _Quantity:
    """Number with an optional unit. `scale` maps lower-case suffixes to base units."""

    remedy: str
    scale: Mapping[str, float]
    whole: bool

    def parse(self, text: str) -> int | float:
        """Parse a number with its unit; raise ValueError with the remedy."""
        match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
        if match is None or match[2] not in self.scale:
            raise ValueError(self.remedy)
        value = float(match[1]) * self.scale[match[2]]
        if not self.whole:
            return value
        if value != int(value):
            raise ValueError(self.remedy)
        return int(value)


_SIZES = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12} | {
    f"{letter}{suffix}": 2.0 ** (10 * power)
    for power, letter in enumerate("kmgt", start=1)
    for suffix in ("", "ib")
}
_TIMES = {
    "": 1.0,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}

_SIZE = _Quantity("a size such as 4096, 512MB (10^6) or 64MiB (2^20)", _SIZES, True)
_TIME = _Quantity("a duration such as 250ms, 2s, 5m or plain seconds", _TIMES, False)
Bytes = Annotated[int, _SIZE]
Duration = Annotated[float, _TIME]


def parse_bytes(text: str) -> int:
    """Return a size in bytes. Raises ValueError that describes valid ones."""
    return int(_SIZE.parse(text))


def parse_duration(text: str) -> float:
    """Return a time in seconds. Raises ValueError that describes valid ones."""
    return float(_TIME.parse(text))


def setting(
    help: str,
    *,
    default: Any = _MISSING,
    default_factory: Callable[[], Any] = _MISSING,
    min: float | None = None,
    max: float | None = None,
    secret: bool = False,
) -> Any:
    """Return a dataclass field with a help text and inclusive bounds.

    Without a default the setting is required.
    """
    metadata = {"help": help, "min": min, "max": max, "secret": secret}
    if default_factory is not _MISSING:
        return dataclasses.field(
            default_factory=default_factory, metadata=metadata, repr=not secret
        )
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


# -------------------------------------------------------------------------------------- the process
_INSTANCE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_IDENTITY = re.compile(r"[0-9]{1,9}:[0-9]{1,19}")


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """Settings of every Motet process.

    Services add their own fields in a subclass.
    """

    nats_url: str = setting(
        "address of the NATS server; several with commas", default="nats://127.0.0.1:4222"
    )
    nats_user: str | None = setting("NATS user (default: the role)", default=None)
    nats_password: str | None = setting("password of the NATS user", default=None, secret=True)
    nats_credentials: Path | None = setting(
        "folder with the user's password in a file named like it", default=None
    )
    peer_ca: Path | None = setting(
        "CA of the stack in PEM: TLS to NATS and for bulk data", default=None
    )
    peer_cert: Path | None = setting(
        "certificate of this host for the others, in PEM", default=None
    )
    peer_key: Path | None = setting("key of that certificate, in PEM", default=None)
    instance: str | None = setting("instance id (default: <role>-<random>)", default=None)
    metrics_port: int = setting(
        "port of /metrics; 0: any free port, -1: off", default=0, min=-1, max=65535
    )
    metrics_host: str = setting("address on which /metrics listens", default="127.0.0.1")
    blob_host: str = setting(
        "address on which others fetch bulk data, such as pictures", default="127.0.0.1"
    )
    blob_name: str | None = setting(
        "name of this host for them (default: --blob-host or its own)", default=None
    )
    log_format: Literal["json", "text"] = setting(
        "json for machines, text for people", default="json"
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "least severe level logged", default="info"
    )
    drain_timeout: Duration | None = setting(
        "time for running calls to end after SIGTERM (default: the role's)", default=None, min=0.0
    )
    wait_for_exit: tuple[str, ...] = setting(
        "processes that end before this one takes memory for its model, as PID:START",
        default=(),
    )
    memory_gate: Path | None = setting(
        "FIFO from which a line is read before this process takes memory for its model",
        default=None,
    )
    stop_with_parent: bool = setting(
        "end when the parent process ends, however it ends", default=False
    )

    def __post_init__(self) -> None:
        if self.instance is not None and not _INSTANCE.fullmatch(self.instance):
            message = f"instance: {self.instance!r} cannot be part of a subject; use a-z, 0-9 and single hyphens"
            raise ConfigError(message, param="instance")
        for identity in self.wait_for_exit:
            if not _IDENTITY.fullmatch(identity):
                message = f"wait_for_exit: {identity!r} is no process; give PID:START, the start in ticks of /proc"
                raise ConfigError(message, param="wait_for_exit")
        if self.nats_password is not None and self.nats_credentials is not None:
            message = "nats_credentials: nats_password is given too; keep one of them"
            raise ConfigError(message, param="nats_credentials")

    def peer_tls(self) -> PeerTls | None:
        """Load the certificates for connections to NATS and to other processes.

        Raises ConfigError. Returns None if TLS is not configured.
        """
        return peer_tls(self.peer_ca, self.peer_cert, self.peer_key)

    def instance_id(self, role: str) -> str:
        """Return the configured instance id, or a new random one, `<role>-<hex>`.

        Call it once per process. Raises ConfigError if the configured id does not begin with the
        role.
        """
        if self.instance is None:
            return subjects.new_instance(role)
        if not self.instance.startswith(f"{role}-"):
            raise ConfigError(
                f"instance: {self.instance!r} must be '{role}-<name>' for this role",
                param="instance",
            )
        return self.instance


# ------------------------------------------------------------------------------------------ loading
@dataclass(frozen=True)
class _Field:
    """Describe one setting: its Python name, flag, environment variable, and type."""

    name: str
    hint: Any
    spec: dataclasses.Field[Any]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "MOTET_" + self.name.upper()

    @property
    def secret(self) -> bool:
        return bool(self.spec.metadata.get("secret"))

    @property
    def repeats(self) -> bool:
        return typing.get_origin(_strip_none(self.hint)[0]) in (tuple, list)

    @property
    def required(self) -> bool:
        return self.spec.default is _MISSING and self.spec.default_factory is _MISSING

    def shown(self, text: str) -> str:
        return _HIDDEN if self.secret else repr(text)

    def read(self, text: str | list[str], source: str) -> Any:
        """Return the typed value of `text`.

        Raises ConfigError that names field, value, source and remedy.
        """
        try:
            value = _convert(self.hint, text)
            for item in value if isinstance(value, (tuple, list)) else (value,):
                self._check_bounds(item)
        except ValueError as error:
            shown = self.shown(text if isinstance(text, str) else ",".join(text))
            raise ConfigError(
                f"{self.name}: {shown} from {source} is wrong; give {error}", param=self.name
            ) from None
        return value

    def _check_bounds(self, value: Any) -> None:
        low, high = self.spec.metadata.get("min"), self.spec.metadata.get("max")
        if value is None or ((low is None or value >= low) and (high is None or value <= high)):
            return
        raise ValueError(
            f"at most {high}"
            if low is None
            else f"at least {low}"
            if high is None
            else f"{low} to {high}"
        )


def _strip_none(hint: Any) -> tuple[Any, bool]:
    """Return `(X, True)` for `X | None`, else `(hint, False)`."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        rest = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if len(rest) == 1:
            return rest[0], True
    return hint, False


def _convert(hint: Any, text: str | list[str]) -> Any:
    """Convert `text` to the type `hint`; raise ValueError that describes valid values."""
    hint, optional = _strip_none(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if optional and isinstance(text, str) and text.strip().lower() in ("", "none"):
        return None
    if origin in (tuple, list):
        parts = (
            text
            if isinstance(text, list)
            else [part.strip() for part in text.split(",") if part.strip()]
        )
        return origin(_convert(args[0], part) for part in parts)
    if isinstance(text, list):
        text = text[-1]
    if origin is Annotated:
        return next(unit for unit in args if isinstance(unit, _Quantity)).parse(text)
    if origin is Literal:
        return _choose(args, text)
    return _scalar(hint, text)


def _choose(choices: tuple[Any, ...], text: str) -> Any:
    for choice in choices:
        if str(choice) == text:
            return choice
    raise ValueError("one of " + ", ".join(str(choice) for choice in choices))


_WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def _scalar(hint: Any, text: str) -> Any:
    if hint is bool:
        if text.strip().lower() not in _WORDS:
            raise ValueError("true or false")
        return _WORDS[text.strip().lower()]
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            raise ValueError("a whole number" if hint is int else "a number") from None
    if hint is Path:
        return Path(text).expanduser()
    if hint is str:
        return text
    raise TypeError(f"a setting cannot have the type {hint!r}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}; see --help")


def _parser(fields: Sequence[_Field], prog: str | None, about: str | None) -> _Parser:
    parser = _Parser(prog=prog, description=about, allow_abbrev=False)
    for field in fields:
        text = f"{field.spec.metadata.get('help', '')} [{field.variable}]"
        if not field.required and field.spec.default not in (None, _MISSING) and not field.secret:
            text += f" (default: {field.spec.default})"
        options: dict[str, Any] = {
            "dest": field.name,
            "default": None,
            "help": text.strip().replace("%", "%%"),
        }
        if field.hint is bool:
            parser.add_argument(
                field.flag, nargs="?", const="true", metavar="true|false", **options
            )
            parser.add_argument(
                "--no-" + field.flag[2:], dest=field.name, action="store_const", const="false"
            )
        else:
            metavar = field.name.rsplit("_", 1)[-1].upper()
            action = "append" if field.repeats else "store"
            parser.add_argument(field.flag, metavar=metavar, action=action, **options)
        if field.secret:
            about_file = f"file that holds {field.flag}"
            parser.add_argument(
                field.flag + "-file", dest=field.name + "_file", metavar="PATH", help=about_file
            )
    return parser


def _secret_file(field: _Field, path: str, source: str) -> str:
    try:
        return Path(path).expanduser().read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{field.name}: cannot read {path!r} from {source}: {error}", param=field.name
        ) from None


def _given(
    field: _Field, flags: Mapping[str, Any], env: Mapping[str, str]
) -> tuple[str | list[str], str] | None:
    """Return the text of a setting and its source; None if it is not given.

    Raises ConfigError if a secret is given both directly and as a file.
    """
    from_env = (env.get(field.variable) or None, env.get(field.variable + "_FILE") or None)
    from_flags = (flags[field.name], flags.get(field.name + "_file"))
    for (direct, path), name, suffix in (
        (from_flags, field.flag, "-file"),
        (from_env, field.variable, "_FILE"),
    ):
        if field.secret and path is not None:
            if direct is not None:
                raise ConfigError(
                    f"{field.name}: both {name} and {name}{suffix} are given; keep one",
                    param=field.name,
                )
            return _secret_file(field, path, name + suffix), name + suffix
        if direct is not None:
            return direct, name
    return None


def load(
    cls: type[T],
    argv: Sequence[str] | None = None,
    env: Mapping[str, str] = os.environ,
    prog: str | None = None,
) -> T:
    """Build the config dataclass `cls` from `argv` (default: `sys.argv[1:]`) and `env`.

    Raises ConfigError for an unknown flag, a wrong or missing value, or a value that
    `cls.__post_init__` refuses. `--help` prints every setting and exits.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = [_Field(f.name, hints[f.name], f) for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    about = (cls.__doc__ or "").split("\n\n")[0]
    flags, unknown = _parser(fields, prog, about).parse_known_args(
        sys.argv[1:] if argv is None else list(argv)
    )
    if unknown:
        _refuse(unknown[0], [field.flag for field in fields])
    values, sources = {}, {}
    for field in fields:
        given = _given(field, vars(flags), env)
        if given is not None:
            values[field.name], sources[field.name] = field.read(*given), given[1]
        elif field.required:
            raise ConfigError(
                f"{field.name}: not set; give {field.flag} or {field.variable}", param=field.name
            )
    return _construct(cls, values, sources)


def _refuse(flag: str, known: list[str]) -> NoReturn:
    """Raise ConfigError for an unknown flag, with the closest known one."""
    near = difflib.get_close_matches(flag.split("=")[0], known, n=1)
    remedy = f"did you mean {near[0]}?" if near else "see --help"
    raise ConfigError(f"command line: unknown argument {flag!r}; {remedy}")


def _construct(cls: type[T], values: dict[str, Any], sources: dict[str, str]) -> T:
    try:
        return cls(**values)
    except ConfigError as error:
        source = sources.get(error.param or "")
        raise ConfigError(
            f"{error.message} (from {source})" if source else error.message, param=error.param
        ) from None
    except ValueError as error:
        raise ConfigError(f"{cls.__name__}: {error}") from error
