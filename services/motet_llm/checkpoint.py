"""A model from a checkpoint folder, or the reason why not.

Safetensors only, no code from the folder, and nothing that would run but run wrong: whatever the engine cannot do
exactly is refused here by name.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.logging import disable_progress_bar

from motet_shared.errors import ConfigError

from . import attention

LAYER_TYPES = {"full_attention", "sliding_attention"}
# Their frequencies depend on the longest sequence of a batch: right only while no sequence leaves the original range.
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def load_config(folder: Path) -> PreTrainedConfig:
    """The folder's config.json. Raises ConfigError for what the engine cannot run."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, StrictDataclassError) as error:
        raise ConfigError(f"{folder}/config.json is not of a model that transformers knows: {error}") from error
    _refuse_unsupported(config)
    return config


def _refuse_unsupported(config: PreTrainedConfig) -> None:
    reason = None
    kinds = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if config.is_encoder_decoder:
        reason = "it is an encoder-decoder"
    elif config.get_text_config() is not config:
        reason = "it is multimodal; give a text-only checkpoint"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        reason = "transformers has no causal language model for it"
    elif not model_class(config)._supports_attention_backend:
        reason = f"{model_class(config).__name__} does not take an attention function from outside"
    elif "logits_to_keep" not in inspect.signature(model_class(config).forward).parameters:
        reason = f"{model_class(config).__name__} computes the logits of every token"
    elif kinds:
        reason = f"it has layers of kind {', '.join(sorted(kinds))}"
    elif not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None):
        reason = "its attention is bidirectional"
    elif getattr(config, "quantization_config", None) is not None:
        reason = "its weights are quantized; give the original ones"
    if reason:
        raise ConfigError(f"model_type={config.model_type!r} is not supported: {reason}")


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def context_of(config: PreTrainedConfig, wanted: int) -> int:
    """Longest sequence in tokens: `wanted`, or the model's own limit if 0. Raises ConfigError beyond the limit."""
    own = getattr(config, "max_position_embeddings", None)
    if own is None:
        if not wanted:
            raise ConfigError(f"context=0: the config of {config.model_type} names no limit; set `context`")
        own = wanted
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]
    for kind in kinds:
        if kind.get("rope_type") in BATCH_DEPENDENT_ROPE:
            own = min(own, kind.get("original_max_position_embeddings") or own)
    if wanted > own:
        raise ConfigError(f"context={wanted}: the model is exact up to {own} tokens; give at most that")
    return wanted or own


def resolve_dtype(config: PreTrainedConfig, wanted: str) -> torch.dtype:
    """The dtype to compute in. 16-bit checkpoints run in float32 where the CPU has no bfloat16 instructions."""
    if wanted != "auto":
        return getattr(torch, wanted)
    native = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native == torch.bfloat16 and fast else torch.float32


def _check_readable(folder: Path) -> None:
    """Say which weights file is missing, torn or not ours to read, before a library says something else."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder}: no *.safetensors; other formats can run code while they load")
    for file in files:
        try:
            with file.open("rb"), safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file} cannot be read: {error}; check its permissions, or copy it again") from error


def load_model(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model with our attention. Raises ConfigError naming every tensor that is missing, left over or misshapen."""
    _check_readable(folder)
    disable_progress_bar()  # standard error is the service's log
    AttentionInterface.register(attention.NAME, attention.paged_attention)
    model, report = model_class(config).from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation=attention.NAME,
        local_files_only=True,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # reported below, with the rest
        output_loading_info=True,
    )
    faults = [f"missing {name}" for name in sorted(report["missing_keys"])]
    faults += [f"unknown {name}" for name in sorted(report["unexpected_keys"])]
    faults += [f"{name} is {list(has)}, not {list(wants)}" for name, has, wants in sorted(report["mismatched_keys"])]
    faults += [str(message) for message in report.get("error_msgs") or ()]
    faults += _untied(model)
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise ConfigError(f"{folder}: the weights contradict config.json: {shown}")
    return model.eval().requires_grad_(False)


def _untied(model: PreTrainedModel) -> list[str]:
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if not getattr(model.config, "tie_word_embeddings", False) or head is None or head.weight is embeddings.weight:
        return []
    return ["tie_word_embeddings=true, but the two matrices differ"]


def eos_ids(folder: Path, config: PreTrainedConfig) -> frozenset[int]:
    """Tokens that end an answer: of generation_config.json where there is one, else of config.json."""
    eos = config.eos_token_id
    if os.path.isfile(folder / "generation_config.json"):
        eos = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id or eos
    return frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos)
