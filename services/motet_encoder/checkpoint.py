"""Load the towers of a checkpoint: processor, tower and projector; no language model.

The model is transformers' own, with a config whose language model has no layers and a vocabulary of
one word, so tensors of the language model are not read. Safetensors only, no code from the folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers.utils.logging import disable_progress_bar

from motet_kernels.runtime.device import dtype_name, find_dtype
from motet_models.checkpoints import check_checkpoint
from motet_models.image_support import HEARING_TYPES, MODEL_TYPES, accepts_audio
from motet_shared.errors import ConfigError

from .families import EncoderFamily, FixedResolution
from .native import NativeResolution
from .omni import Omni
from .packed import leave_out, pack
from .pixtral import Pixtral
from .processed import Processed
from .processors import load_processor
from .sounds import Sounds
from .tiles import Tiles
from .tower_attention import prefers_packed_attention, use_packed_attention
from .voxtral import Voxtral

_LOAD_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    ImportError,
    SafetensorError,
)
_LOCAL = {"local_files_only": True, "trust_remote_code": False}
# Families whose code does more than their processor, or needs less; `Processed` is for all others.
_FAMILIES: dict[str, type[EncoderFamily]] = {
    "idefics3": Tiles,
    "llava": FixedResolution,
    "mistral3": Pixtral,
    "qwen2_5_omni_thinker": Omni,
    "qwen2_5_vl": NativeResolution,
    "qwen2_vl": NativeResolution,
    "qwen3_5": NativeResolution,
    "qwen3_5_moe": NativeResolution,
    "qwen3_omni_moe_thinker": Omni,
    "qwen3_vl": NativeResolution,
    "qwen3_vl_moe": NativeResolution,
    "smolvlm": Tiles,
    "voxtral": Voxtral,
}
# Names of tensors in current checkpoints and, without prefix, in older ones; and of the other stages
# of omni models.
_LANGUAGE_TENSORS = (
    r"^(thinker\.)?((model\.)?(language_model|text_model|layers|words|norm)|(language_model\.)?lm_head)\."
    r"|^(talker|token2wav|code2wav)\."
)
_EMBEDDING_TABLE = (
    "embed_tokens"  # the one-word table of the model, which no tensor may be loaded into
)


def load_family(
    folder: Path,
    dtype: torch.dtype | None,
    weights: str = "exact",
    device: torch.device | None = None,
) -> EncoderFamily:
    """Load everything that turns a picture into embeddings.

    dtype: of weights and activations; None: float32, on a GPU the checkpoint's. weights: one of
    `config.WEIGHTS`. device: where the tower computes, by default the CPU. Raises ConfigError that
    says what is wrong with the folder.
    """
    device = device or torch.device("cpu")
    disable_progress_bar()  # standard error is the log of the service
    check_checkpoint(folder, without=re.compile(_LANGUAGE_TENSORS))
    config = _read(folder, "config.json", AutoConfig.from_pretrained, **_LOCAL)
    config = getattr(config, "thinker_config", config)
    if config.model_type not in MODEL_TYPES | HEARING_TYPES:
        known = ", ".join(sorted(MODEL_TYPES | HEARING_TYPES))
        raise ConfigError(
            f"model={str(folder)!r}: model_type {config.model_type!r} has no encoder that is "
            f"supported; give one of {known}"
        )
    hears = config.model_type in HEARING_TYPES
    if hears and not accepts_audio(config.to_dict()):
        raise ConfigError(
            f"model={str(folder)!r}: has an adapter that its language model switches to for sound"
            " (has_lora_adapter), which is not supported; serve it as text"
        )
    family = _FAMILIES.get(config.model_type)
    if family is None or family is Omni:
        processor = _read(folder, "the processor", load_processor, config)
    else:
        part = AutoFeatureExtractor if hears else AutoImageProcessor
        processor = _read(folder, "preprocessor_config.json", part.from_pretrained, **_LOCAL)
    tokenizer = _read(folder, "the tokenizer", AutoTokenizer.from_pretrained, **_LOCAL)
    tower = getattr(config, "audio_config" if hears else "vision_config", None)
    own = config.dtype or getattr(tower, "dtype", None) or config.get_text_config().dtype
    dtype = find_dtype("auto" if dtype is None else dtype_name(dtype), own, device, ConfigError)
    towers = _load_towers(folder, config, dtype).to(device)
    leave_out(towers)
    pack(towers, weights)
    if not hears and prefers_packed_attention(device, dtype):
        use_packed_attention(towers)
    return (family or (Sounds if hears else Processed))(towers, processor, tokenizer)


def _read(folder: Path, what: str, read: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return read(folder, *args, **options)
    except (*_LOAD_ERRORS, StrictDataclassError) as error:
        first = str(error).strip().split("\n")[0]
        raise ConfigError(f"model={str(folder)!r}: {what} cannot be read: {first}") from error


def _load_towers(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    model_class: Any = MODEL_MAPPING[type(config)]
    members = {
        "_keys_to_ignore_on_load_unexpected": [_LANGUAGE_TENSORS],
        "_keys_to_ignore_on_load_missing": [_EMBEDDING_TABLE],
        "__module__": model_class.__module__,
    }
    kind: Any = type(model_class.__name__, (model_class,), members)
    try:
        model, report = kind.from_pretrained(
            folder,
            config=_without_language_layers(config),
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below
            output_loading_info=True,
            key_mapping={_EMBEDDING_TABLE: "words"},
        )
    except _LOAD_ERRORS as error:
        raise ConfigError(
            f"model={str(folder)!r}: transformers cannot make {model_class.__name__} of it: {error}"
        ) from error
    problems = [f"missing {name}" for name in sorted(report["missing_keys"])]
    problems += [f"unknown {name}" for name in sorted(report["unexpected_keys"])]
    problems += [
        f"{name} is {list(actual)}, not {list(expected)}"
        for name, actual, expected in sorted(report["mismatched_keys"])
    ]
    if problems:
        summary = "; ".join(problems[:8]) + (
            f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        )
        raise ConfigError(f"model={str(folder)!r}: the weights contradict config.json: {summary}")
    towers: PreTrainedModel = model.eval().requires_grad_(False)
    return towers


def _without_language_layers(config: PreTrainedConfig) -> PreTrainedConfig:
    """Change `config` to a language model of no layers and one word.

    The width stays, as the projector depends on it.
    """
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    return config
