"""Which class speaks which checkpoint. A further codec language model is one line here and one file."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from motet_shared.errors import ConfigError

from .config import EngineConfig
from .utterance import Key, Piece, Utterance


class SpeechModel(Protocol):
    """What the engine needs of a model: sentences come, go, and get on by a step, all together."""

    sample_rate: int
    voices: tuple[str, ...]
    rates: tuple[float, float]  # the speeds at which it can speak by itself

    def __len__(self) -> int: ...

    def add(self, key: Key, utterance: Utterance) -> None: ...

    def remove(self, key: Key) -> None: ...

    def step(self) -> list[Piece]: ...

    def check_integrity(self) -> None: ...


def load(config: EngineConfig) -> SpeechModel:
    """The model of a checkpoint folder. ConfigError if it is none that can speak."""
    folder = Path(config.model)
    kind = _model_type(folder)
    loader = _LOADERS.get(kind)
    if loader is None:
        known = ", ".join(sorted(_LOADERS))
        raise ConfigError(f"model={config.model!r}: model_type {kind!r} is no speech model that is known ({known})")
    return loader(folder, config)


def _model_type(folder: Path) -> str:
    try:
        settings = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model={str(folder)!r}: its config.json cannot be read: {error}") from None
    return str(settings.get("model_type")) if isinstance(settings, dict) else ""


def _codec_lm(module: str, name: str) -> Callable[[Path, EngineConfig], SpeechModel]:
    def loaded(folder: Path, config: EngineConfig) -> SpeechModel:
        from .codec_lm import CodecBatch

        family: Any = getattr(importlib.import_module(f".{module}", __package__), name)
        made = family(folder, dtype=_dtype(config), greedy=config.greedy)
        return CodecBatch(made, first_chunk=config.first_chunk, chunk=config.chunk)

    return loaded


def _vits(folder: Path, config: EngineConfig) -> SpeechModel:
    from .vits import Vits

    return Vits(folder, dtype=_dtype(config), first_chunk=config.first_chunk, chunk=config.chunk)


def _dtype(config: EngineConfig) -> torch.dtype:
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


_LOADERS: dict[str, Callable[[Path, EngineConfig], SpeechModel]] = {
    "motet_pocket_tts": _codec_lm("motet_pocket", "MotetPocket"),
    "csm": _codec_lm("csm", "Csm"),
    "pocket_tts": _codec_lm("pocket_tts", "PocketTts"),
    "vits": _vits,
}
