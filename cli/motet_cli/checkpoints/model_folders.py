"""Find model folders on this machine, and check that their files are complete.

A model is a checkpoint folder as transformers saves it, served under the folder's name. Only the
presence of its files is checked here, before any process is started; services check the contents.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet_cli.checkpoints.conversion import gguf_folder, gguf_name, is_gguf, with_tokenizer
from motet_cli.hub.reference import parse_reference
from motet_models.image_support import has_encoder
from motet_models.omni import speaks
from motet_models.video_support import makes_videos
from motet_shared.errors import ConfigError

DEFAULT_LLM = "pocket-chat"
DEFAULT_ASR = "pocket-asr"
DEFAULT_TTS = "pocket-tts"
DEFAULT_SPEAKERS = "pocket-speakers"
DEFAULT_DIFFUSION = "pocket-draw"
DEFAULT_FILM = "pocket-film"
DEFAULT_EMBEDDING = "pocket-embed"
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True)
class ModelFolder:
    """Name a checkpoint folder and the model that is served from it."""

    name: str
    path: Path

    @property
    def has_encoder(self) -> bool:
        """Return True for a language model that also takes images or sound."""
        return has_encoder(_config(self.path))

    @property
    def speaks(self) -> bool:
        """Return True for an omni model, which has a talker and code2wav besides its thinker."""
        return speaks(_config(self.path))


def model_dirs(env: dict[str, str] | None = None) -> list[Path]:
    """Return the folders that are searched for models by name.

    Those of `MOTET_MODELS`, separated by colons, come first; then the bundled models, in the source
    tree or in `motet_cli/models` of an installed wheel.
    """
    value = (os.environ if env is None else env).get("MOTET_MODELS", "")
    given = [Path(part).expanduser() for part in value.split(os.pathsep) if part]
    here = Path(__file__).resolve()
    bundled = (here.parents[3] / "models", here.parents[1] / "models")
    return [path for path in (*given, *bundled) if path.is_dir()]


def missing_parts(folder: Path) -> list[str]:
    """Return the files that a checkpoint folder lacks; empty if it is complete."""
    missing = []
    if _model_type(folder) is None:
        missing.append('config.json with a "model_type"')
    if not (folder / "tokenizer.json").is_file():
        missing.append("tokenizer.json")
    if not any((folder / name).is_file() for name in _WEIGHTS) and not any(folder.glob("*.gguf")):
        missing.append(f"{_WEIGHTS[0]} (or {_WEIGHTS[1]} with its parts, or a GGUF file)")
    return missing


def _model_type(folder: Path) -> str | None:
    return _config(folder).get("model_type")


def _config(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json; empty without a readable one."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def local_models() -> list[ModelFolder]:
    """Return the complete folders of the model directories; of equal names, the first."""
    found: dict[str, ModelFolder] = {}
    for directory in model_dirs():
        for path in sorted(directory.iterdir()):
            if path.is_dir() and not missing_parts(path):
                found.setdefault(path.name, ModelFolder(path.name, path))
    return list(found.values())


def find_checkpoint(name: str) -> Path | None:
    """Return the folder of a model with weights by name, with or without a tokenizer, or None."""
    folders = [directory / name for directory in model_dirs()]
    return next(
        (
            path.resolve()
            for path in folders
            if _model_type(path) and (path / _WEIGHTS[0]).is_file()
        ),
        None,
    )


def resolve(given: str) -> ModelFolder:
    """Return the model for a value of `--llm`, downloading it if needed.

    given: a folder, the name of a local model or of one on a hub, or NAME= before one of these.
    Raises ConfigError if it cannot be served.
    """
    name, path = locate(given, "--llm")
    path = with_tokenizer(path, "--llm")
    if missing := missing_parts(path):
        raise ConfigError(
            f"--llm: {given!r} lacks {' and '.join(missing)}; give a complete checkpoint folder",
            param="--llm",
        )
    return ModelFolder(name, path)


def locate(given: str, flag: str) -> tuple[str, Path]:
    """Return the served name and the folder for a value of `flag`.

    Searches in this order: a folder or a GGUF file, the model directories, the hub's cache, the
    hub. A GGUF file has a folder made of it. Raises ConfigError if none has it.
    """
    name, separator, source = given.partition("=")
    if not separator or Path(given).expanduser().exists():
        name, source = "", given
    if is_gguf(path := Path(source).expanduser()):
        return name or gguf_name(path), gguf_folder(path, flag)
    if (folder := local_folder(source)) is not None:
        return name or folder.name, folder
    if (reference := parse_reference(source)) is None:
        raise ConfigError(
            f"{flag}: {source!r} is not a folder, a GGUF file, a local model ({_known_models()}) or"
            " org/name on a hub; give one of these",
            param=flag,
        )
    # Imported here: huggingface_hub takes half a second, and most starts need no hub.
    from motet_cli.hub.download import find_cached, pull

    path = find_cached(reference) or pull(reference)
    return name or reference.name, gguf_folder(path, flag) if reference.file else path


def local_folder(given: str) -> Path | None:
    """Return the folder of a path or, without a separator, of a local model's name, or None."""
    path = Path(given).expanduser()
    if path.is_dir():
        return path.resolve()
    if not given or os.sep in given:
        return None
    named = (directory / given for directory in model_dirs())
    return next((path.resolve() for path in named if path.is_dir()), None)


def resolve_all(given: Sequence[str]) -> list[ModelFolder]:
    """Return one model per `--llm`; the default model if none is given.

    Raises ConfigError for two models of one name.
    """
    models = [resolve(item) for item in given or (DEFAULT_LLM,)]
    for model in models:
        same = [str(other.path) for other in models if other.name == model.name]
        if len(same) > 1:
            raise ConfigError(
                f"--llm: {' and '.join(same)} have the same name {model.name!r}; give NAME=MODEL",
                param="--llm",
            )
    return models


def resolve_adapters(given: Sequence[str], num_models: int) -> list[str]:
    """Return NAME=FOLDER for each `--adapter`, with the folder's absolute path.

    Raises ConfigError for a value without name or folder, or a folder without PEFT's files.
    """
    if given and num_models > 1:
        raise ConfigError(
            "--adapter: an adapter belongs to one model, but several are served; give one --llm",
            param="--adapter",
        )
    found = []
    for one in given:
        name, _, folder = one.partition("=")
        if not name or not folder:
            raise ConfigError(
                f"--adapter: {one!r} lacks a name or a folder; give NAME=FOLDER, or NAME=org/name",
                param="--adapter",
            )
        _, path = locate(folder, "--adapter")
        if missing := [part for part in _ADAPTER if not (path / part).is_file()]:
            raise ConfigError(
                f"--adapter: {one!r} lacks {' and '.join(missing)}; give a folder saved by PEFT",
                param="--adapter",
            )
        found.append(f"{name}={path}")
    return found


def resolve_adapter_folder(given: str | None) -> Path | None:
    """Return the folder of `--adapter-folder`, which is created where it is missing.

    Raises ConfigError if it cannot be.
    """
    if given is None:
        return None
    folder = Path(given).expanduser().resolve()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--adapter-folder: {given!r}: {error.strerror}; give a folder that can be written",
            param="--adapter-folder",
        ) from None
    return folder


def resolve_templates(given: Sequence[str], served: Sequence[ModelFolder]) -> list[str]:
    """Return NAME=FILE for each `--chat-template`, with the file's absolute path.

    Raises ConfigError for a file that is missing, or a name that is not served.
    """
    names = [model.name for model in served]
    found = []
    for one in given:
        name, separator, path = one.partition("=")
        if not separator or Path(one).expanduser().is_file():
            name, path = (names[0] if len(names) == 1 else ""), one
        if name not in names:
            raise ConfigError(
                f"--chat-template: {one!r} names no served model; give NAME=FILE with one of"
                f" {', '.join(names)}",
                param="--chat-template",
            )
        if not Path(path).expanduser().is_file():
            raise ConfigError(
                f"--chat-template: {path!r} is no file; give one with a Jinja template",
                param="--chat-template",
            )
        found.append(f"{name}={Path(path).expanduser().resolve()}")
    return found


def resolve_optional(given: str | None, flag: str, default: str) -> ModelFolder | None:
    """Return the model for a value of `flag`; None for "none".

    Without a value, returns the default model, or None if it is missing. Raises ConfigError for an
    incomplete folder.
    """
    model = _locate_optional(given, flag, default)
    if model is None:
        return None
    if _model_type(model.path) is None or not any(
        (model.path / name).is_file() for name in _WEIGHTS
    ):
        raise ConfigError(
            f'{flag}: {str(model.path)!r} lacks config.json with a "model_type", or {_WEIGHTS[0]};'
            " give a complete checkpoint folder",
            param=flag,
        )
    return model


def resolve_drawing(
    given: str | None, flag: str = "--draw", default: str = DEFAULT_DIFFUSION
) -> ModelFolder | None:
    """Return the model for a value of `--draw`, a diffusers folder; see `resolve_optional`."""
    model = _locate_optional(given, flag, default)
    if model is None:
        return None
    if not (model.path / "model_index.json").is_file():
        raise ConfigError(
            f"{flag}: {str(model.path)!r} lacks model_index.json; give a diffusers folder",
            param=flag,
        )
    return model


def resolve_film(given: str | None) -> ModelFolder | None:
    """Return the model for a value of `--film`, a diffusers folder that makes videos."""
    model = resolve_drawing(given, "--film", DEFAULT_FILM)
    if model is not None and not makes_videos(model.path):
        raise ConfigError(
            f"--film: {str(model.path)!r} makes no videos that are served (docs/videos.md);"
            " give it as --draw if it makes pictures",
            param="--film",
        )
    return model


def _locate_optional(given: str | None, flag: str, default: str) -> ModelFolder | None:
    if given == "none":
        return None
    if given is None:
        path = local_folder(default)
        return None if path is None else ModelFolder(path.name, path)
    return ModelFolder(*locate(given, flag))


def _known_models() -> str:
    names = [model.name for model in local_models()]
    return (
        "known: " + ", ".join(names)
        if names
        else "none found; set MOTET_MODELS to a directory of models"
    )
