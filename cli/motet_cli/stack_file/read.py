"""Read motet.toml into its tables, with errors that name table, field, value and remedy."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
from msgspec.structs import fields

from motet_cli.stack_file.schema import (
    ModelTable,
    OnDemandTable,
    RoleTable,
    StackFile,
    Table,
    UpSettings,
)
from motet_shared.errors import ConfigError
from motet_shared.process.config import parse_bytes, parse_duration
from motet_shared.wire.presence import ROLES

DEFAULT = Path("motet.toml")
T = TypeVar("T", bound=Table)

_TABLES = ("settings", "on_demand", "roles", "models")
_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_NAME = re.compile(r"[^\x00-\x1f\x7f=]{1,200}")


def read_stack_file(path: Path) -> StackFile:
    """Return the tables of a file. Raises ConfigError for anything that is wrong in it."""
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"--config: cannot read {str(path)!r}: {error}; give a TOML file", param="--config"
        ) from None
    if unknown := sorted(document.keys() - set(_TABLES)):
        raise _wrong(unknown[0], document[unknown[0]], f"is unknown; there are {_listed(_TABLES)}")
    found = StackFile(
        settings=_table("settings", document.get("settings", {}), UpSettings),
        on_demand=_table("on_demand", document.get("on_demand", {}), OnDemandTable),
        roles=_tables("roles", document.get("roles", {}), RoleTable),
        models=_tables("models", document.get("models", {}), ModelTable),
    )
    _check(found)
    return found


def _tables(where: str, given: Any, kind: type[T]) -> dict[str, T]:
    if not isinstance(given, dict):
        raise _wrong(where, given, f"is no table; write [{where}.NAME]")
    return {name: _table(f"{where}.{name}", table, kind) for name, table in given.items()}


def _table(where: str, given: Any, kind: type[T]) -> T:
    """Convert one table. Raises ConfigError that names what does not fit."""
    if not isinstance(given, dict):
        raise _wrong(where, given, f"is no table; write [{where}]")
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _explained(where, given, kind, str(error)) from None


def _explained(where: str, given: dict[str, Any], kind: type[Table], error: str) -> ConfigError:
    match = _AT.match(error)
    what, steps = (match["what"], match["path"] or "") if match else (error, "")
    if unknown := _UNKNOWN.search(what):
        name = unknown["name"]
        known = _listed([field.name for field in fields(kind)])
        return _wrong(f"{where}.{name}", given.get(name), f"is unknown; there are {known}")
    value: Any = given
    for name, index in _STEP.findall(steps):
        inside = name if name else int(index) if index.isdigit() else None
        try:
            value = value[inside]
        except (KeyError, IndexError, TypeError):
            break
    field = steps.lstrip(".").partition(".")[0].partition("[")[0]
    return _wrong(where + steps, value, f"does not fit: {what}; {_remedy(kind, field)}")


def _remedy(kind: type[Table], field: str) -> str:
    """Return what a field takes: the words of a choice, else the place where it is described."""
    types = {one.name: one.type for one in fields(kind)}
    words = [word for word in get_args(types.get(field)) if isinstance(word, str)]
    return f"give {_listed(words, 'or')}" if words else "docs/stack-file.md lists what it takes"


def _check(file: StackFile) -> None:
    for role in file.roles:
        known = ("gateway", *ROLES)
        if role not in known:
            raise _wrong(f"roles.{role}", role, f"is no role; the roles are {_listed(known)}")
    bytes_of("on_demand.memory", file.on_demand.memory)
    seconds_of("on_demand.keep_alive", file.on_demand.keep_alive)
    for name, model in file.models.items():
        _check_model(f"models.{name}", name, model)


def _check_model(where: str, name: str, model: ModelTable) -> None:
    if not _NAME.fullmatch(name):
        raise _wrong(where, name, "cannot name a model; give 1 to 200 characters without =")
    bytes_of(f"{where}.memory", model.memory)
    if model.keep_alive is not None:
        seconds_of(f"{where}.keep_alive", model.keep_alive)
        if model.load != "on demand":
            raise _wrong(
                f"{where}.keep_alive", model.keep_alive, 'is for load = "on demand"; leave it out'
            )
    if model.role != "llm":
        for field, value, default in (
            ("instances", model.instances, 1),
            ("chat_template", model.chat_template, None),
        ):
            if value != default:
                raise _wrong(f"{where}.{field}", value, "is for language models; leave it out")


def bytes_of(where: str, given: str | int) -> int:
    """Return a size in bytes. Raises ConfigError that names `where`."""
    try:
        size = parse_bytes(str(given))
    except ValueError as error:
        raise _wrong(where, given, f"is no size; give {error}") from None
    if size < 0:
        raise _wrong(where, given, "is negative; give a size such as 2GiB")
    return size


def seconds_of(where: str, given: str | float) -> float:
    """Return a `keep_alive` in seconds, infinite for "forever". Raises ConfigError."""
    if given == "forever":
        return float("inf")
    try:
        seconds = parse_duration(str(given))
    except ValueError as error:
        raise _wrong(where, given, f'is no time; give {error}, or "forever"') from None
    if seconds < 0:
        raise _wrong(where, given, 'is negative; give a time such as 5m, or "forever"')
    return seconds


def _wrong(where: str, value: Any, problem: str) -> ConfigError:
    shown = repr(value)
    return ConfigError(f"motet.toml: {where}={shown[:80]} {problem}", param=where)


def _listed(names: Any, last: str = "and") -> str:
    *most, end = names
    return f"{', '.join(most)} {last} {end}" if most else str(end)
