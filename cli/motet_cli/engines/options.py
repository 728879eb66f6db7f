"""Choose what serves the language models of `motet up`: Motet's own engine, or another one."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from motet_shared.errors import ConfigError

from .degrees import parse_degrees
from .environment import check_environment, host_command, host_variables

KINDS = ("motet", "vllm", "llama.cpp", "openai")
FIELDS = ("engine_url", "engine_key_file", "engine_model", "engine_python", "engine_args")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Configure an engine other than Motet's own.

    kind: one of KINDS. url: base URL of a running server.
    python: interpreter of the environment in which the engine is installed.
    args: arguments of the engine. model: the model's name at the server; "": its name here, or the
    only one there.
    """

    kind: str
    url: str = ""
    python: str = ""
    args: str = ""
    key_file: Path | None = None
    model: str = ""

    def arguments(self) -> list[str]:
        """Return the command line arguments of an engine host."""
        argv = ["--engine", self.kind]
        given = {
            "--engine-url": self.url,
            "--engine-python": "" if self.kind == "vllm" else self.python,
            "--engine-key-file": str(self.key_file or ""),
            "--engine-model": self.model,
        }
        argv += [part for name, value in given.items() if value for part in (name, value)]
        return argv + ([f"--engine-args={self.args}"] if self.args else [])

    def command(self) -> tuple[str, ...]:
        """Return the beginning of a host's command line, if it runs in the engine's environment."""
        return host_command(self.python) if self.kind == "vllm" else ()

    def variables(self) -> dict[str, str]:
        """Return what the environment of a host has besides."""
        return host_variables() if self.kind == "vllm" else {}


def parse_engine(args: Namespace) -> EngineOptions | None:
    """Return the options of another engine; None for Motet's own. Raises ConfigError."""
    given = {name: getattr(args, name) or "" for name in FIELDS}
    if args.engine != "motet":
        _check_own_features(args)
    return engine_options(args.engine, given)


def engine_options(
    kind: str, given: dict[str, str], where: str = "--{}", key: str = "-"
) -> EngineOptions | None:
    """Return the options of an engine from its fields; None for Motet's own.

    where, key: how messages write the name of a field, and what stands for its underscores. Raises
    ConfigError.
    """

    def named(field: str) -> str:
        return where.format(field.replace("_", key))

    if kind == "motet":
        for name in FIELDS:
            if given.get(name):
                flag = named(name)
                raise ConfigError(
                    f"{flag}: needs {named('engine')} vllm, llama.cpp or openai", param=flag
                )
        return None
    _check_place(kind, given, named("engine_url"), named("engine_python"))
    python = given.get("engine_python", "")
    return EngineOptions(
        kind=kind,
        url=given.get("engine_url", ""),
        python=check_environment(python, kind, named("engine_python")) if python else "",
        args=given.get("engine_args", ""),
        key_file=_key_file(given.get("engine_key_file", ""), named("engine_key_file")),
        model=given.get("engine_model", ""),
    )


def _check_place(kind: str, given: dict[str, str], url: str, python: str) -> None:
    """Raise ConfigError unless an engine is where its kind can be: at a URL, or in an environment."""
    has_url, has_python = bool(given.get("engine_url")), bool(given.get("engine_python"))
    if kind == "vllm" and not has_python:
        raise ConfigError(
            f"{python}: is not given; vllm needs the Python of an environment that has it, such as"
            " vllm/bin/python; a vLLM server that runs already is engine openai",
            param=python,
        )
    if (kind == "openai" and not has_url) or (not has_url and not has_python):
        raise ConfigError(
            f"{url}: is not given; engine {kind} needs the server's, such as"
            " http://127.0.0.1:8001/v1",
            param=url,
        )
    if (kind == "openai" and has_python) or (has_url and has_python):
        flag = url if kind == "vllm" else python
        raise ConfigError(
            f"{flag}: engine {kind} is either at a URL or in an environment; leave one out",
            param=flag,
        )


def _check_own_features(args: Namespace) -> None:
    """Raise ConfigError for flags that only Motet's own engine follows."""
    for flag in parse_degrees(args):
        raise ConfigError(
            f"{flag}: only Motet's own engine follows it here; give engine {args.engine} its own flag"
            " in --engine-args, or where its server is started",
            param=flag,
        )
    for name in ("prefill", "speculate", "adapter", "adapter_folder"):
        if getattr(args, name) and (name, args.engine) != ("adapter", "vllm"):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag}: Motet's own engine has it, --engine {args.engine} does not; leave it out,"
                " and set it where that engine's server is started",
                param=flag,
            )


def _key_file(given: str, flag: str) -> Path | None:
    if not given:
        return None
    path = Path(given).expanduser()
    if not path.is_file():
        raise ConfigError(f"{flag}: {given!r} is not a file; write the key into one", param=flag)
    return path.resolve()
