"""Map checkpoint folders to model classes; a further codec language model adds one line here."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, Protocol

import torch

from motet_kernels.runtime.device import find_device, find_dtype
from motet_models.checkpoints import check_checkpoint, check_weights
from motet_shared.errors import ConfigError
from motet_tts.engine.utterance import Key, StepOutput, Utterance

from .config import EngineConfig


class SpeechModel(Protocol):
    """Define the interface of a model to the engine: sentences join, leave and advance by a step.

    sample_rate: Hz.
    voices: names, the default one first.
    rates: slowest and fastest speed that the model supports itself; others are stretched.
    device, dtype: where and in which type it computes.
    """

    sample_rate: int
    voices: tuple[str, ...]
    rates: tuple[float, float]
    device: torch.device
    dtype: torch.dtype

    def __len__(self) -> int:
        """Return the number of sentences in the model."""

    def add(self, key: Key, utterance: Utterance) -> None:
        """Add a sentence to the next step. Raises BadRequest if it cannot be spoken."""

    def remove(self, key: Key) -> None:
        """Drop a sentence without further output. Ignore unknown keys."""

    def step(self) -> list[StepOutput]:
        """Advance all sentences; return the samples that are ready."""

    def check_integrity(self) -> None:
        """Raise RuntimeError if the model's records are inconsistent."""


def load(config: EngineConfig) -> SpeechModel:
    """Load the model of a checkpoint folder.

    Raises ConfigError if it is no speech model that is supported, or a setting does not fit it.
    """
    device = find_device(config.device, ConfigError)
    folder = Path(config.model)
    settings = _settings(folder)
    check_checkpoint(folder)
    check_weights(folder / "voices")
    kind = str(settings.get("model_type"))
    loader = _LOADERS.get(kind)
    if loader is None:
        known = ", ".join(sorted(_LOADERS))
        raise ConfigError(
            f"model={config.model!r}: model_type {kind!r} is no speech model; give one of {known}"
        )
    own = getattr(torch, str(settings.get("dtype") or settings.get("torch_dtype")), None)
    dtype = find_dtype(config.dtype, own, device, ConfigError)
    return loader(folder, config, device=device, dtype=dtype)


def _settings(folder: Path) -> dict[str, Any]:
    try:
        settings = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model={str(folder)!r}: its config.json cannot be read: {error}"
        ) from None
    return settings if isinstance(settings, dict) else {}


class _Loader(Protocol):
    def __call__(
        self, folder: Path, config: EngineConfig, *, device: torch.device, dtype: torch.dtype
    ) -> SpeechModel: ...


def _codec_lm(module: str, name: str) -> _Loader:
    def loaded(
        folder: Path, config: EngineConfig, *, device: torch.device, dtype: torch.dtype
    ) -> SpeechModel:
        from motet_tts.models.codec_lm import CodecBatch

        family: Any = getattr(importlib.import_module(f".models.{module}", __package__), name)
        made = family(folder, device=device, dtype=dtype, greedy=config.greedy)
        return CodecBatch(made, first_chunk=config.first_chunk, chunk=config.chunk)

    return loaded


def _vits(
    folder: Path, config: EngineConfig, *, device: torch.device, dtype: torch.dtype
) -> SpeechModel:
    from motet_tts.models.vits import Vits

    return Vits(
        folder, device=device, dtype=dtype, first_chunk=config.first_chunk, chunk=config.chunk
    )


_LOADERS: dict[str, _Loader] = {
    "motet_pocket_tts": _codec_lm("motet_pocket", "MotetPocket"),
    "csm": _codec_lm("csm", "Csm"),
    "pocket_tts": _codec_lm("pocket_tts", "PocketTts"),
    "vits": _vits,
}
