"""Read `--engine-args`: arguments of `vllm serve` that concern its engine."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, NoReturn

from motet_engines.config import EnginesConfig
from motet_shared.errors import ConfigError

from .library import Library

# Set by the host, or would run code of the checkpoint.
_REFUSED = {
    "--model": "give the model as --llm",
    "--tokenizer": "the model's folder has its tokenizer",
    "--skip-tokenizer-init": "grammars need the tokenizer",
    "--trust-remote-code": "code of a checkpoint is not run",
    "--served-model-name": "clients use the name of --llm",
}
_DEFAULTS = {
    "--structured-outputs-config": '{"backend": "guidance"}',
    "--scheduling-policy": "priority",
}


def engine_arguments(library: Library, config: EnginesConfig) -> Any:
    """Return `AsyncEngineArgs` of the setting `engine_args`. Raises ConfigError."""
    given = split_arguments(config.engine_args)
    parser = library.engine_args.add_cli_args(_parser_class(library.argument_parser)())
    own = ["--model", str(Path(config.model).resolve())]
    if config.context:
        own += ["--max-model-len", str(config.context)]
    return library.engine_args.from_cli_args(parser.parse_args([*_with_defaults(given), *own]))


def split_arguments(text: str) -> list[str]:
    """Return the words of the setting. Raises ConfigError for those that the host sets."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"engine_args={text!r}: {error}", param="engine_args") from None
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name in _REFUSED:
            raise ConfigError(
                f"engine_args: {name} is not possible here: {_REFUSED[name]}", param="engine_args"
            )
    return words


def _with_defaults(given: list[str]) -> list[str]:
    names = {word.partition("=")[0].partition(".")[0].replace("_", "-") for word in given}
    missing = [f"{name}={value}" for name, value in _DEFAULTS.items() if name not in names]
    return [*missing, *given]


def _parser_class(base: Any) -> Any:
    class Parser(base):  # type: ignore[misc]
        """Raise ConfigError where argparse would end the process."""

        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"engine_args: {message}", param="engine_args")

    return Parser
