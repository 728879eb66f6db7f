"""A model from a checkpoint folder, or the reason why not.

Safetensors only, no code from the folder, and nothing that would run but run wrong: whatever the engine cannot do
exactly is refused here by name.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.logging import disable_progress_bar

from motet_kernels import gpu
from motet_kernels.device import NARROW, check_float16, dtype_name
from motet_shared.errors import ConfigError
from motet_shared.seeing import MODEL_TYPES

from . import attention, language_part, mixers, quantized, support

INDEX = "model.safetensors.index.json"
SPARSE_LAYERS = {
    "indexed_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "minimax_m3_sparse",
}
# What a model takes when it goes on from another one's states.
FOREIGN_STATES = {"shared_kv_states", "backbone_last_hidden_state"}
# Their frequencies depend on the longest sequence of a batch: right only while no sequence leaves the original range.
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# What transformers raises for files that make no sense to it.
UNUSABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    StrictDataclassError,
)
QUANTIZED = {"I8", "F8_E4M3", "F8_E5M2"}  # types of safetensors that mean nothing without their scales
KV_NAMES = {"float8": "float8_e4m3fn"}  # what torch and the wire call it
UNLIMITED = 1 << 20  # tokens: up to where masks are looked at, for a model that names no limit


def load_config(folder: Path) -> PreTrainedConfig:
    """The folder's config.json, of a model that also sees its text part. ConfigError for what the engine cannot run."""
    config = _read_config(folder)
    if language_part.sees(config):
        config = language_part.text_config(config)
    check_config(config)
    return config


def sight_shape(folder: Path) -> language_part.SightShape | None:
    """What the folder's model takes for a picture; None if it sees nothing."""
    return language_part.sight_shape(_read_config(folder))


def _read_config(folder: Path) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except UNUSABLE as error:
        raise ConfigError(f"{folder}/config.json is not of a model that transformers knows: {error}") from error


def check_config(config: PreTrainedConfig) -> None:
    """Raises ConfigError for what config.json alone is enough to refuse."""
    for reason in _reasons(config):
        raise ConfigError(f"model_type={config.model_type!r} is not supported: {reason}")


def _reasons(config: PreTrainedConfig) -> Iterator[str]:
    """What the model's code does is for `support.examine` to see."""
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder"
    found = find_class(config)
    if found and (foreign := FOREIGN_STATES & inspect.signature(found.forward).parameters.keys()):
        yield f"it goes on from the states of another model ({', '.join(sorted(foreign))})"
    if config.get_text_config() is not config or {"vision_config", "audio_config"} & config.sub_configs.keys():
        yield "it is multimodal; give a text-only checkpoint"
    if found is None:
        yield "transformers has no causal language model for it"
        return
    if "logits_to_keep" not in inspect.signature(found.forward).parameters:
        yield f"{found.__name__} computes the logits of every token"
    if sparse := SPARSE_LAYERS & set(getattr(config, "layer_types", None) or ()):
        yield f"it attends to tokens that it selects itself (layers of kind {', '.join(sorted(sparse))})"
    if (refusal := quantized.refusal(config)) is not None:
        yield refusal


def find_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The causal language model for `config`: transformers' choice, else the one that its `architectures` name."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if config.model_type.endswith("_text") and config.model_type.removesuffix("_text") in MODEL_TYPES:
        return language_part.LanguageModel
    for name in config.architectures or ():
        found: Any = getattr(transformers, name, None)
        if getattr(found, "config_class", None) is type(config) and found.can_generate():
            return found
    return None


def exact_range(config: PreTrainedConfig) -> int | None:
    """Up to how many tokens the engine is exact; None if the config names no limit."""
    limits = [getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)]
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = rope.values() if rope and all(v is None or isinstance(v, dict) for v in rope.values()) else [rope]
    for kind in kinds:
        if kind and kind.get("rope_type") in BATCH_DEPENDENT_ROPE:
            limits.append(kind.get("original_max_position_embeddings"))
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        # Within its first chunk it is plain causal attention.
        limits.append(getattr(config, "attention_chunk_size", None))
    if getattr(config, "attn_temperature_tuning", False):
        limits.append(config.floor_scale - 1)  # up to there the temperature is 1
    return min((limit for limit in limits if limit is not None), default=None)


def context_of(config: PreTrainedConfig, wanted: int) -> int:
    """Longest sequence in tokens: `wanted`, or the model's own limit if 0. Raises ConfigError beyond the limit."""
    own = exact_range(config)
    if own is None:
        if not wanted:
            raise ConfigError(f"context=0: the config of {config.model_type} names no limit; set `context`")
        own = wanted
    if wanted > own:
        raise ConfigError(f"context={wanted}: the model is exact up to {own} tokens; give at most that")
    return wanted or own


def resolve_kv_dtype(config: PreTrainedConfig, wanted: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the KV cache: as wide as the checkpoint was made for, where there is a choice."""
    check_float16("kv_dtype", wanted, device, ConfigError)
    if wanted != "auto":
        return getattr(torch, KV_NAMES.get(wanted, wanted))
    if gpu.is_gpu(device) and dtype in NARROW:
        return dtype
    return torch.bfloat16 if config.dtype == torch.bfloat16 else torch.float32


def resolve_weights(config: PreTrainedConfig, wanted: str, dtype: torch.dtype, device: torch.device) -> str:
    """The format of the matrices: the checkpoint's, but float32 for float16, which CPUs compute slowly.

    On a GPU, which multiplies numbers of one type, that of the activations.
    """
    check_float16("weights", wanted, device, ConfigError)
    if wanted != "auto":
        return wanted
    if gpu.is_gpu(device):
        return dtype_name(dtype)
    return "bfloat16" if config.dtype == torch.bfloat16 else "float32"


def loaded_dtype(config: PreTrainedConfig, weights: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype to read a checkpoint in: of 16 bits as such, since twice its size would be twice the memory."""
    if weights == "float32":
        return dtype if dtype == torch.float32 or not gpu.is_gpu(device) else torch.float32
    if gpu.is_gpu(device) and dtype in NARROW:
        return dtype
    return torch.bfloat16 if config.dtype == torch.bfloat16 else dtype


def _check_readable(folder: Path) -> None:
    """Say which weights file is missing, torn or not ours to read, before a library says something else."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder}: no *.safetensors; other formats can run code while they load")
    if absent := sorted(_indexed(folder) - {file.name for file in files}):
        raise ConfigError(f"{folder}: {INDEX} names {', '.join(absent)}; copy what is missing")
    for file in files:
        try:
            with file.open("rb"), safe_open(file, framework="pt") as weights:
                names = weights.keys()
                quantized = [name for name in names if weights.get_slice(name).get_dtype() in QUANTIZED]
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file} cannot be read: {error}; check its permissions, or copy it again") from error
        if quantized:
            raise ConfigError(f"{file}: {quantized[0]} is quantized; give the original weights")


def _indexed(folder: Path) -> set[str]:
    """The names of the files that a checkpoint of several files consists of, as its index says."""
    if not (folder / INDEX).is_file():
        return set()
    try:
        return set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / INDEX} cannot be read: {error!r}; copy it again") from error


def load_model(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a config that `load_config` gave, with our attention.

    Raises ConfigError naming every tensor that is missing, left over or misshapen.
    """
    found: Any = find_class(config)
    options: dict[str, Any] = {}
    sees = language_part.sees(_read_config(folder))
    if quantized.is_quantized(folder, config):
        if sees:
            raise ConfigError(f"{folder}: quantized weights of a model that sees are not read; give the original ones")
        return prepare(quantized.load(folder, config, found, dtype))
    _check_readable(folder)
    disable_progress_bar()  # standard error is the service's log
    if sees:
        found, options = language_part.without_eyes(found), {"key_mapping": language_part.RENAMED}
    try:
        model, report = found.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="eager",  # until `prepare`
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below, with the rest
            output_loading_info=True,
            **options,
        )
    except UNUSABLE as error:
        raise ConfigError(f"{folder}: transformers cannot make {found.__name__} of it: {error!r}") from error
    if faults := [*_faults(report), *_untied(model)]:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise ConfigError(f"{folder}: the weights contradict config.json: {shown}")
    return prepare(model.eval().requires_grad_(False))


def _faults(report: dict[str, Any]) -> list[str]:
    """What transformers found when it loaded a checkpoint."""
    faults = [f"missing {name}" for name in sorted(report["missing_keys"])]
    faults += [f"unknown {name}" for name in sorted(report["unexpected_keys"])]
    faults += [f"{name} is {list(has)}, not {list(wants)}" for name, has, wants in sorted(report["mismatched_keys"])]
    return faults + [str(message) for message in report.get("error_msgs") or ()]


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model run over packed rows: our mixers and our attention. Raises ConfigError if it would run wrong."""
    mixers.install_recurrent(model)
    support.examine(model, exact_range(model.config) or UNLIMITED)
    support.use(model, attention.NAME, attention.paged_attention)
    mixers.install_latent(model)
    return model


def backbone(model: PreTrainedModel) -> nn.Module:
    """The part that makes the last hidden states: the head's model, or its decoder where the head calls that itself."""
    inner = getattr(model.base_model, "decoder", None)
    return inner if isinstance(inner, PreTrainedModel) else model.base_model


def _untied(model: PreTrainedModel) -> list[str]:
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if not getattr(model.config, "tie_word_embeddings", False) or head is None or head.weight is embeddings.weight:
        return []
    return ["tie_word_embeddings=true, but the two matrices differ"]


def eos_ids(folder: Path, config: PreTrainedConfig) -> frozenset[int]:
    """Tokens that end an answer: of generation_config.json where there is one, else of config.json."""
    eos = getattr(config, "eos_token_id", None)
    if os.path.isfile(folder / "generation_config.json"):
        try:
            eos = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id or eos
        except UNUSABLE as error:
            raise ConfigError(f"{folder}/generation_config.json cannot be read: {error}; copy it again") from error
    return frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos)
