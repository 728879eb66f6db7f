"""Choose what serves the language models of `motet up`: Motet's own engine, or a server elsewhere."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from motet_shared.errors import ConfigError

KINDS = ("motet", "openai", "llama.cpp")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Hold the engine of `--llm` models that is not Motet's own: its kind, URL, key and model."""

    kind: str
    url: str
    key_file: Path | None = None
    model: str = ""  # what the server calls the model; "": its name here, or the only one there

    def arguments(self) -> list[str]:
        """Return the command line arguments of an engine host."""
        argv = ["--engine", self.kind, "--engine-url", self.url]
        if self.key_file is not None:
            argv += ["--engine-key-file", str(self.key_file)]
        if self.model:
            argv += ["--engine-model", self.model]
        return argv


def parse_engine(args: Namespace) -> EngineOptions | None:
    """Return the options of another engine; None for Motet's own. Raises ConfigError."""
    if args.engine == "motet":
        for name in ("engine_url", "engine_key_file", "engine_model"):
            if getattr(args, name):
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag}: needs --engine openai or llama.cpp", param=flag)
        return None
    if not args.engine_url:
        raise ConfigError(
            f"--engine-url: is not given; --engine {args.engine} needs the server's, such as"
            " http://127.0.0.1:8001/v1",
            param="--engine-url",
        )
    _check_own_features(args)
    return EngineOptions(
        kind=args.engine,
        url=args.engine_url,
        key_file=_key_file(args.engine_key_file),
        model=args.engine_model or "",
    )


def _check_own_features(args: Namespace) -> None:
    """Raise ConfigError for flags that only Motet's own engine follows."""
    for name in ("prefill", "speculate", "adapter", "adapter_folder"):
        if getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag}: Motet's own engine has it, --engine {args.engine} does not; leave it out,"
                " and set it where that engine's server is started",
                param=flag,
            )


def _key_file(given: str | None) -> Path | None:
    if not given:
        return None
    path = Path(given).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"--engine-key-file: {given!r} is not a file; write the key into one",
            param="--engine-key-file",
        )
    return path.resolve()
