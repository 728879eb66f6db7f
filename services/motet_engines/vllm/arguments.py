"""Read `--engine-args`: arguments of `vllm serve` that concern its engine."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from motet_engines.config import EnginesConfig
from motet_shared.errors import ConfigError

from .adapters import Adapter, adapter_arguments
from .library import Library

# Set by the host, or would run code of the checkpoint.
_REFUSED = {
    "--model": "give the model as --llm",
    "--tokenizer": "the model's folder has its tokenizer",
    "--skip-tokenizer-init": "grammars need the tokenizer",
    "--trust-remote-code": "code of a checkpoint is not run",
    "--served-model-name": "clients use the name of --llm",
    "--lora-modules": "give adapters as --adapter, or as the setting adapters",
}
_DEFAULTS = {
    "--structured-outputs-config": '{"backend": "guidance"}',
    "--scheduling-policy": "priority",
}


def engine_arguments(
    library: Library, config: EnginesConfig, adapters: Iterable[Adapter] = ()
) -> Any:
    """Return `AsyncEngineArgs` of the setting `engine_args`. Raises ConfigError."""
    given = split_arguments(config.engine_args)
    parser = library.engine_args.add_cli_args(_parser_class(library.argument_parser)())
    own = ["--model", str(Path(config.model).resolve())]
    if config.context:
        own += ["--max-model-len", str(config.context)]
    words = _with_defaults(given, _DEFAULTS | adapter_arguments(adapters))
    return library.engine_args.from_cli_args(parser.parse_args([*words, *own]))


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


def _with_defaults(given: list[str], defaults: Mapping[str, str]) -> list[str]:
    """Return the words with those defaults before them that they do not set; "" for a switch."""
    names = {word.partition("=")[0].partition(".")[0].replace("_", "-") for word in given}
    missing = [
        f"{name}={value}" if value else name
        for name, value in defaults.items()
        if name not in names
    ]
    return [*missing, *given]


def _parser_class(base: Any) -> Any:
    class Parser(base):  # type: ignore[misc]
        """Raise ConfigError where argparse would end the process."""

        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"engine_args: {message}", param="engine_args")

    return Parser
