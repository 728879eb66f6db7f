"""Which class speaks which checkpoint. A further codec language model is one line here and one file."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, Protocol

import torch

from motet_kernels.device import find_device, find_dtype
from motet_shared.errors import ConfigError

from .config import EngineConfig
from .utterance import Key, Piece, Utterance


class SpeechModel(Protocol):
    """What the engine needs of a model: sentences come, go, and get on by a step, all together."""

    sample_rate: int
    voices: tuple[str, ...]
    rates: tuple[float, float]  # the speeds at which it can speak by itself
    device: torch.device
    dtype: torch.dtype

    def __len__(self) -> int: ...

    def add(self, key: Key, utterance: Utterance) -> None: ...

    def remove(self, key: Key) -> None: ...

    def step(self) -> list[Piece]: ...

    def check_integrity(self) -> None: ...


def load(config: EngineConfig) -> SpeechModel:
    """The model of a checkpoint folder. ConfigError if it is none that can speak."""
    device = find_device(config.device, ConfigError)
    folder = Path(config.model)
    settings = _settings(folder)
    kind = str(settings.get("model_type"))
    loader = _LOADERS.get(kind)
    if loader is None:
        known = ", ".join(sorted(_LOADERS))
        raise ConfigError(f"model={config.model!r}: model_type {kind!r} is no speech model that is known ({known})")
    own = getattr(torch, str(settings.get("dtype") or settings.get("torch_dtype")), None)
    dtype = find_dtype(config.dtype, own, device, ConfigError)
    return loader(folder, config, device=device, dtype=dtype)


def _settings(folder: Path) -> dict[str, Any]:
    try:
        settings = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model={str(folder)!r}: its config.json cannot be read: {error}") from None
    return settings if isinstance(settings, dict) else {}


class _Loader(Protocol):
    def __call__(
        self, folder: Path, config: EngineConfig, *, device: torch.device, dtype: torch.dtype
    ) -> SpeechModel: ...


def _codec_lm(module: str, name: str) -> _Loader:
    def loaded(folder: Path, config: EngineConfig, *, device: torch.device, dtype: torch.dtype) -> SpeechModel:
        from .codec_lm import CodecBatch

        family: Any = getattr(importlib.import_module(f".{module}", __package__), name)
        made = family(folder, device=device, dtype=dtype, greedy=config.greedy)
        return CodecBatch(made, first_chunk=config.first_chunk, chunk=config.chunk)

    return loaded


def _vits(folder: Path, config: EngineConfig, *, device: torch.device, dtype: torch.dtype) -> SpeechModel:
    from .vits import Vits

    return Vits(folder, device=device, dtype=dtype, first_chunk=config.first_chunk, chunk=config.chunk)


_LOADERS: dict[str, _Loader] = {
    "motet_pocket_tts": _codec_lm("motet_pocket", "MotetPocket"),
    "csm": _codec_lm("csm", "Csm"),
    "pocket_tts": _codec_lm("pocket_tts", "PocketTts"),
    "vits": _vits,
}
