"""Define the settings of the tokenizer process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from motet_shared.errors import ConfigError
from motet_shared.process.config import Duration, ProcessConfig, setting
from motet_shared.reasoning import registry as reasoning
from motet_shared.tool_formats.registry import NAMES


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(ProcessConfig):
    """Turn chat messages into token ids and token ids into text, for one or more models.

    Each model is `path` or `name=path`; without a name it is called as its folder.
    """

    model: tuple[str, ...] = setting(
        "checkpoint folder, or name=folder; repeat it for several models"
    )
    threads: int = setting("threads that encode long prompts", default=2, min=1, max=64)
    inline_chars: int = setting(
        "prompts of up to so many characters are encoded on the event loop", default=4096, min=0
    )
    process_chars: int = setting(
        "longer prompts are encoded in child processes, which can be killed", default=65536, min=1
    )
    encoders: int = setting(
        "child processes that encode the longest prompts", default=2, min=1, max=64
    )
    encode_limit: Duration = setting(
        "how long one of them may take for a prompt", default=20.0, min=0.1
    )
    max_active: int = setting("requests at a time; further ones are refused", default=1024, min=1)
    window: int = setting(
        "items that a decode instance may send ahead of a slow client", default=64, min=2
    )
    decode_wait: Duration = setting(
        "how long a request waits for a ready decode instance", default=5.0, min=0
    )
    tool_format: str = setting(
        f"how the models write tool calls: auto (as their chat templates do), {', '.join(NAMES)}",
        default="auto",
    )
    reasoning_format: str = setting(
        "how the models write reasoning: auto (as their chat templates do), none (tags stay text), "
        f"{', '.join(reasoning.NAMES)}",
        default="auto",
    )
    chat_template: tuple[str, ...] = setting(
        "file of a Jinja template in place of the checkpoint's, or name=file for one of several models",
        default=(),
    )
    generation_config: str = setting(
        "where recommended sampling comes from: auto (the checkpoint's generation_config.json), none, "
        "or such a file",
        default="auto",
    )
    max_images: int = setting("most images in one chat", default=64, min=0)
    routing: Literal["prefix", "load", "random"] = setting(
        "what decode instances are chosen by: cached prefixes and load, load alone, or nothing",
        default="prefix",
    )
    max_moves: int = setting(
        "how often one request may move to another decode instance", default=8, min=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.models()
        self.templates()
        if self.generation_config not in ("auto", "none") and not _is_file(self.generation_config):
            raise ConfigError(
                f"generation_config={self.generation_config!r}: give auto, none, or a JSON file",
                param="generation_config",
            )
        _check_name("tool_format", self.tool_format, ("auto", *NAMES))
        _check_name("reasoning_format", self.reasoning_format, ("auto", "none", *reasoning.NAMES))

    def models(self) -> dict[str, str]:
        """Return checkpoint folders by model name.

        Raises ConfigError for an empty or repeated name.
        """
        models: dict[str, str] = {}
        for entry in self.model:
            name, path = split_model(entry)
            if not name or not path:
                raise ConfigError(
                    f"model: {entry!r} has no name or no folder; give name=folder", param="model"
                )
            if name in models:
                raise ConfigError(
                    f"model: two are called {name!r}; give one of them a name=folder", param="model"
                )
            models[name] = path
        if not models:
            raise ConfigError("model: none is given; give --model name=folder", param="model")
        return models

    def templates(self) -> dict[str, str]:
        """Return files of chat templates by model name.

        Raises ConfigError for a file that is missing, or a model that is not served.
        """
        models = self.models()
        found: dict[str, str] = {}
        for entry in self.chat_template:
            name, separator, path = entry.partition("=")
            if not separator or _is_file(entry):
                name, path = (next(iter(models)) if len(models) == 1 else ""), entry
            if name not in models:
                raise ConfigError(
                    f"chat_template={entry!r}: several models are served, or not this one; give"
                    f" name=file for one of {', '.join(models)}",
                    param="chat_template",
                )
            if not _is_file(path):
                raise ConfigError(
                    f"chat_template={entry!r}: no such file; give one with a Jinja template",
                    param="chat_template",
                )
            found[name] = path
        return found


def _is_file(path: str) -> bool:
    return Path(path).expanduser().is_file()


def _check_name(field: str, value: str, names: tuple[str, ...]) -> None:
    """Raise ConfigError for a value that is none of `names`."""
    if value not in names:
        raise ConfigError(f"{field}={value!r}: choose one of {', '.join(names)}", param=field)


def split_model(entry: str) -> tuple[str, str]:
    """Return (name, path) of `name=path`, or of a bare path, whose name is its last part.

    A name may have the form `org/name`; a path that contains "=" is one if it exists.
    """
    name, separator, path = entry.partition("=")
    if separator and not name.startswith(("/", ".", "~")) and not Path(entry).exists():
        return name.strip(), path.strip()
    return Path(entry).expanduser().resolve().name, entry
