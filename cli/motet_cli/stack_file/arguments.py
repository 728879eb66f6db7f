"""Join motet.toml with the command line of `motet up`: flags override the file's settings."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from msgspec.structs import fields

from motet_cli.stack_file.read import DEFAULT, read_stack_file
from motet_cli.stack_file.schema import StackFile


def find_stack_file(given: str | None) -> Path | None:
    """Return the file of `--config`, else motet.toml of the current folder; None without one."""
    if given == "none":
        return None
    if given is not None:
        return Path(given).expanduser()
    return DEFAULT if DEFAULT.is_file() else None


def read_given(given: str | None) -> StackFile:
    """Return the tables of the file that `--config` names. Raises ConfigError if it is wrong."""
    path = find_stack_file(given)
    return StackFile() if path is None else read_stack_file(path)


def flag_defaults(file: StackFile) -> dict[str, Any]:
    """Return the settings of a file as defaults of the flags of `motet up`."""
    settings = {one.name: getattr(file.settings, one.name) for one in fields(file.settings)}
    # Flags that may be repeated: those of the command line come behind.
    for name in ("device", "memory_share"):
        value = settings[name]
        settings[name] = [str(value)] if isinstance(value, (str, float)) else value
    return {name: value for name, value in settings.items() if value is not None}


def stack_file_of(args: Namespace) -> StackFile:
    """Return the file that was read for a command line; an empty one if none was."""
    found: StackFile | None = getattr(args, "stack_file", None)
    return StackFile() if found is None else found
