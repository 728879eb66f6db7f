"""Map checkpoint folders to model classes; a further codec language model adds one line here.

`scripts/list_speech.py` writes docs/speech.md of it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from motet_kernels.runtime.device import find_device, find_dtype
from motet_models.checkpoints import check_checkpoint, check_weights
from motet_models.omni import talker_name
from motet_shared.errors import ConfigError
from motet_tts.engine.utterance import Key, StepOutput, Utterance

from .config import EngineConfig
from .talker_prompt import TalkerPrompt


class SpeechModel(Protocol):
    """Define the interface of a model to the engine: sentences join, leave and advance by a step.

    sample_rate: Hz.
    voices: names, the default one first.
    rates: slowest and fastest speed that the model supports itself; others are stretched.
    clones: whether it speaks with the voice of `Utterance.sample`.
    instructs: whether it follows `Utterance.instructions`.
    device, dtype: where and in which type it computes.
    """

    sample_rate: int
    voices: tuple[str, ...]
    rates: tuple[float, float]
    clones: bool
    instructs: bool
    device: torch.device
    dtype: torch.dtype

    def __len__(self) -> int:
        """Return the number of sentences in the model."""

    @property
    def has_work(self) -> bool:
        """Return True if `step` would do something."""

    def add(self, key: Key, utterance: Utterance) -> None:
        """Add a sentence to the next step. Raises BadRequest if it cannot be spoken."""

    def remove(self, key: Key) -> None:
        """Drop a sentence without further output. Ignore unknown keys."""

    def step(self) -> list[StepOutput]:
        """Advance all sentences; return the samples that are ready."""

    def check_integrity(self) -> None:
        """Raise RuntimeError if the model's records are inconsistent."""


@runtime_checkable
class TokenFed(Protocol):
    """Define the interface of a model whose tokens decode generates."""

    def feed(self, key: Key, ids: Iterable[int], last: bool) -> None:
        """Give a sentence the tokens that its `StepOutput.generate` asked for."""


@runtime_checkable
class Answering(Protocol):
    """Define the interface of a model that speaks replies from their states, not texts."""

    talker: TalkerPrompt


def load(config: EngineConfig) -> SpeechModel:
    """Load the model of a checkpoint folder.

    Raises ConfigError if it is no speech model that is supported, or a setting does not fit it.
    """
    device = find_device(config.device, ConfigError)
    folder = Path(config.model)
    settings = _settings(folder)
    check_checkpoint(folder)
    check_weights(folder / "voices")
    kind = model_type(config)
    loader = FAMILIES.get(kind) or ANSWERING.get(kind)
    if loader is None:
        cause = REFUSED.get(kind, "is no speech model that is known here")
        raise ConfigError(
            f"model={config.model!r}: model_type {kind!r} {cause}; give one of {', '.join(sorted(FAMILIES))}"
        )
    own = getattr(torch, str(settings.get("dtype") or settings.get("torch_dtype")), None)
    dtype = find_dtype(config.dtype, own, device, ConfigError)
    return loader(folder, config, device=device, dtype=dtype)


def model_type(config: EngineConfig) -> str:
    """Return the `model_type` of the checkpoint. Raises ConfigError if its config is unreadable."""
    return str(_settings(Path(config.model)).get("model_type"))


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


def _bark(
    folder: Path, config: EngineConfig, *, device: torch.device, dtype: torch.dtype
) -> SpeechModel:
    from motet_tts.models.bark import Bark

    return Bark(folder, device=device, dtype=dtype, greedy=config.greedy)


def _orpheus(
    folder: Path, config: EngineConfig, *, device: torch.device, dtype: torch.dtype
) -> SpeechModel:
    from motet_tts.models.orpheus import Orpheus

    return Orpheus(
        folder,
        device=device,
        served_as=config.served_as,
        greedy=config.greedy,
        first_chunk=config.first_chunk,
        chunk=config.chunk,
    )


def _omni(name: str) -> _Loader:
    def loaded(
        folder: Path, config: EngineConfig, *, device: torch.device, dtype: torch.dtype
    ) -> SpeechModel:
        from motet_tts.models import omni_speech

        made: SpeechModel = getattr(omni_speech, name)(
            folder,
            device=device,
            served_as=config.language_model or talker_name(config.model_name),
            greedy=config.greedy,
            first_chunk=config.first_chunk,
            chunk=config.chunk,
        )
        return made

    return loaded


FAMILIES: dict[str, _Loader] = {
    "motet_pocket_tts": _codec_lm("motet_pocket", "MotetPocket"),
    "bark": _bark,
    "csm": _codec_lm("csm", "Csm"),
    "dia": _codec_lm("dia", "Dia"),
    "gradium_phonon_tts": _codec_lm("pocket_tts", "Phonon"),
    "higgs_audio_v2": _codec_lm("higgs_audio", "HiggsAudio"),
    "llama": _orpheus,
    "pocket_tts": _codec_lm("pocket_tts", "PocketTts"),
    "speecht5": _codec_lm("speecht5", "SpeechT5"),
    "vibevoice": _codec_lm("vibevoice", "VibeVoice"),
    "vits": _vits,
}
# Families whose steps are long enough for several threads although their weights are few.
LONG_STEPS = frozenset({"vits"})
# Models that speak what they answer, from the states of their language model (docs/graphs.md).
ANSWERING: dict[str, _Loader] = {
    "qwen2_5_omni": _omni("Qwen25Omni"),
    "qwen3_omni_moe": _omni("Qwen3Omni"),
}
# Families of transformers that speak, and why they are not run; the sentence goes on after the name.
_ANSWERS = "speaks what its own language model answers, not a text that is given"
_SENTENCES = "computes a sentence as a whole in several models; none of them is run here"
REFUSED: dict[str, str] = {
    "fastspeech2_conformer": "has a tokenizer that needs the package g2p_en, with data of its own",
    "fastspeech2_conformer_with_hifigan": "has a tokenizer that needs the package g2p_en, with data of its own",
    "moshi": _ANSWERS,
    "musicgen": "makes music",
    "musicgen_melody": "makes music",
    "qwen2_5_omni": _ANSWERS,
    "qwen3_omni_moe": _ANSWERS,
    "seamless_m4t": _SENTENCES,
    "seamless_m4t_v2": _SENTENCES,
}
