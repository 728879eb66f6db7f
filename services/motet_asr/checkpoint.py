"""Load an engine from a checkpoint folder: safetensors only, no code from the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoFeatureExtractor, AutoTokenizer
from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer
from transformers.utils.logging import disable_progress_bar

from motet_asr.engine.engine import Engine
from motet_asr.models.registry import RECOGNIZERS
from motet_kernels.runtime.device import check_float16, find_device, find_dtype
from motet_models.checkpoints import check_checkpoint
from motet_models.image_support import HEARING_TYPES
from motet_shared.errors import ConfigError

from .config import EngineConfig

# Types that transformers lists beside recognizers, and what they are.
_OTHER_TYPES = {
    "dia": "speaks, and does not hear",
    "pop2piano": "writes notes for a piano, not words",
    "speech-encoder-decoder": "joins an encoder and a decoder of any class, whose prompt it does not say",
}
# What transformers raises for files that it cannot interpret.
_UNUSABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)


def load_engine(config: EngineConfig) -> Engine:
    """Load the engine of a checkpoint folder.

    Raises ConfigError that names what is wrong with the folder or a setting.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    device = find_device(config.device, ConfigError)
    folder = Path(config.model)
    check_checkpoint(folder)
    model_config = _load(folder, "config.json", AutoConfig)
    dtype, kind = (
        find_dtype(config.dtype, model_config.dtype, device, ConfigError),
        model_config.model_type,
    )
    check_float16("weights", config.weights, device, ConfigError)
    if (recognizer := RECOGNIZERS.get(kind)) is None:
        raise ConfigError(
            f"model={config.model!r}: model_type {kind!r} {refusal(kind)}; give one of "
            f"{', '.join(RECOGNIZERS)}"
        )
    _check_class(config, model_config, recognizer.class_name)
    if config.weights != "auto" and kind != "whisper":
        raise ConfigError(
            f"weights={config.weights!r}: only Whisper's matrices can be packed; leave it at auto"
        )
    disable_progress_bar()
    model_class = getattr(transformers, recognizer.class_name)
    model = _load(folder, "the weights", model_class, dtype=dtype, use_safetensors=True)
    model.eval().requires_grad_(False).to(device)
    extractor = _load(folder, "preprocessor_config.json", AutoFeatureExtractor)
    tokenizer = _load_tokenizer(folder)
    if extractor.sampling_rate != (rate := recognizer.family.stream_rate):
        raise ConfigError(
            f"model={config.model!r}: its features are computed at {extractor.sampling_rate} Hz; "
            f"give a model for {rate} Hz"
        )
    return recognizer.load(config, model, extractor, tokenizer)


def refusal(model_type: str) -> str:
    """Return why a checkpoint of a type does not load, as the end of a sentence about it."""
    if model_type in HEARING_TYPES:
        return "is a chat model that hears: serve it with `motet up --llm`"
    if model_type in _OTHER_TYPES:
        return _OTHER_TYPES[model_type]
    return "is no speech recognizer that loads here"


def _check_class(config: EngineConfig, model_config: Any, wanted: str) -> None:
    """Raise ConfigError if the checkpoint is of another class, such as an encoder without a head."""
    given = model_config.architectures or [wanted]
    if not isinstance(given, list) or wanted not in given:
        raise ConfigError(
            f"model={config.model!r}: architectures={given!r} writes no text; give a {wanted}"
        )


def _load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer; Mistral's tekken.json is converted, without its own library."""
    tekken = folder / "tekken.json"
    if not tekken.is_file() or (folder / "tokenizer.json").is_file():
        return _load(folder, "the tokenizer", AutoTokenizer)
    try:
        return convert_tekken_tokenizer(str(tekken))
    except _UNUSABLE as error:
        raise ConfigError(
            f"model={str(folder)!r}: {tekken.name} cannot be read: {error}"
        ) from error


def _load(folder: Path, subject: str, kind: Any, **options: Any) -> Any:
    try:
        return kind.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )
    except _UNUSABLE as error:
        first = str(error).strip().split("\n")[0]
        raise ConfigError(f"model={str(folder)!r}: {subject} cannot be read: {first}") from error
