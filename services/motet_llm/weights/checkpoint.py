"""Load a model from a checkpoint folder, or give the reason why it cannot be served.

Only safetensors and GGUF are read, no code from the folder runs, and no model is served that would
compute wrong results: whatever the engine cannot do exactly is refused here by name.
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
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.logging import disable_progress_bar

from motet_kernels import gpu
from motet_kernels.runtime.device import NARROW, check_float16, dtype_name
from motet_llm.attention import paged as attention
from motet_llm.models import language_model as language_part
from motet_llm.models import mixers, support
from motet_llm.stages import talker
from motet_models.checkpoints import check_numbers, check_weights
from motet_models.context import trained_context
from motet_models.omni import Stage
from motet_shared.errors import ConfigError

from . import composite
from . import quantized_checkpoint as quantized

INDEX = "model.safetensors.index.json"
SPARSE_LAYERS = {
    "indexed_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "minimax_m3_sparse",
}
# Arguments of models that continue from another model's states.
FOREIGN_STATES = {"shared_kv_states", "backbone_last_hidden_state"}
# Errors that transformers raises for files it cannot use.
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
QUANTIZED = {
    "I8",
    "F8_E4M3",
    "F8_E5M2",
}  # dtypes of safetensors that need scales
KV_NAMES = {"float8": "float8_e4m3fn"}  # its name in torch and on the wire
UNLIMITED = 1 << 20  # most tokens up to which masks are examined


def prepare_renaming() -> None:
    """Have transformers compile its rules for names of weights, once for all forked processes.

    It would do so when it loads a model.
    """
    get_checkpoint_conversion_mapping("legacy")


def load_config(folder: Path, stage: Stage = "thinker") -> PreTrainedConfig:
    """Return the config of a folder, of a composite model that of its language model.

    stage: of an omni model. Raises ConfigError for a model that the engine cannot run.
    """
    config = _read_config(folder, stage)
    if stage == "talker":
        return talker.talker_config(config)
    check_config(config)
    return composite.text_config(config) if composite.is_composite(config) else config


def image_embedding_shape(folder: Path) -> language_part.ImageEmbeddingShape | None:
    """Return the shape of a model's image embeddings; None if it reads no images."""
    return language_part.image_embedding_shape(_read_config(folder))


def _read_config(folder: Path, stage: Stage = "thinker") -> PreTrainedConfig:
    """Return the config of a folder; of an omni model that of a stage."""
    whole = _whole_config(folder)
    config: PreTrainedConfig = getattr(whole, f"{stage}_config", None) or whole
    if config.dtype is None:
        config.dtype = whole.dtype
    return config


def _whole_config(folder: Path) -> PreTrainedConfig:
    check_numbers(folder)
    try:
        whole: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except UNUSABLE as error:
        raise ConfigError(
            f"{folder}/config.json is not of a model that transformers knows: {error}"
        ) from error
    return whole


def check_config(config: PreTrainedConfig) -> None:
    """Raise ConfigError for a model that its config.json is enough to refuse."""
    for reason in _reasons(config):
        raise ConfigError(f"model_type={config.model_type!r} is not supported: {reason}")


def _reasons(config: PreTrainedConfig) -> Iterator[str]:
    """Yield reasons for refusal; what the model's code does is checked by `support.examine`."""
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder"
    whole = composite.whole_class(config) if composite.is_composite(config) else None
    text = config.get_text_config()
    found = find_class(text)
    for one in (whole, found):
        if one and (foreign := FOREIGN_STATES & inspect.signature(one.forward).parameters.keys()):
            yield f"it goes on from the states of another model ({', '.join(sorted(foreign))})"
    if found is None and whole is None:
        yield "transformers has no causal language model for it"
        return
    if found and "logits_to_keep" not in inspect.signature(found.forward).parameters:
        yield f"{found.__name__} computes the logits of every token"
    if sparse := SPARSE_LAYERS & set(getattr(text, "layer_types", None) or ()):
        yield f"it attends to tokens that it selects itself (layers of kind {', '.join(sorted(sparse))})"
    if (refusal := quantized.refusal(config) or quantized.refusal(text)) is not None:
        yield refusal


def find_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the causal language model class of `config`; None if there is none.

    It is transformers' choice, else the one that the config's `architectures` name.
    """
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        value: type[PreTrainedModel] | None = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return value
    for name in config.architectures or ():
        found: Any = getattr(transformers, name, None)
        if getattr(found, "config_class", None) is type(config) and found.can_generate():
            value = found
            return value
    return None


def exact_range(config: PreTrainedConfig) -> int | None:
    """Return the number of tokens up to which the engine is exact; None without any limit."""
    return trained_context(config.to_dict())


def context_of(config: PreTrainedConfig, wanted: int) -> int:
    """Return the longest sequence in tokens: `wanted`, or the model's own limit if that is 0.

    Raises ConfigError beyond the limit, and for 0 if the config names no limit.
    """
    own = exact_range(config)
    if own is None:
        if not wanted:
            raise ConfigError(
                f"context=0: the config of {config.model_type} names no limit; set `context`"
            )
        own = wanted
    if wanted > own:
        raise ConfigError(
            f"context={wanted}: the model is exact up to {own} tokens; give at most that"
        )
    return wanted or own


def resolve_kv_dtype(
    config: PreTrainedConfig, wanted: str, dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """Return the dtype of the KV cache; for "auto", the one that the checkpoint was made for."""
    check_float16("kv_dtype", wanted, device, ConfigError)
    if wanted != "auto":
        value: torch.dtype = getattr(torch, KV_NAMES.get(wanted, wanted))
        return value
    if gpu.is_gpu(device) and dtype in NARROW:
        return dtype
    return torch.bfloat16 if config.dtype == torch.bfloat16 else torch.float32


def resolve_weights(
    config: PreTrainedConfig, wanted: str, dtype: torch.dtype, device: torch.device
) -> str:
    """Return the format of the matrices; for "auto", the checkpoint's.

    On a CPU, "auto" is float32 for float16, which CPUs compute slowly. On a GPU, which multiplies
    numbers of one dtype, it is that of the activations.
    """
    check_float16("weights", wanted, device, ConfigError)
    if wanted != "auto":
        return wanted
    if gpu.is_gpu(device):
        return dtype_name(dtype)
    return "bfloat16" if config.dtype == torch.bfloat16 else "float32"


def loaded_dtype(
    config: PreTrainedConfig, weights: str, dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """Return the dtype in which a checkpoint is read.

    16-bit checkpoints are read in 16 bits where possible: float32 would take twice the memory.
    """
    if weights == "float32":
        return dtype if dtype == torch.float32 or not gpu.is_gpu(device) else torch.float32
    if gpu.is_gpu(device) and dtype in NARROW:
        return dtype
    return torch.bfloat16 if config.dtype == torch.bfloat16 else dtype


def _check_readable(folder: Path) -> None:
    """Raise ConfigError that names a weights file which is missing, truncated or unreadable.

    This precedes a library's own, less specific error.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder}: no *.safetensors; other formats can run code while they load")
    if absent := sorted(_indexed(folder) - {file.name for file in files}):
        raise ConfigError(f"{folder}: {INDEX} names {', '.join(absent)}; copy what is missing")
    for file in files:
        try:
            with file.open("rb"), safe_open(file, framework="pt") as weights:
                names = weights.keys()
                quantized = [
                    name for name in names if weights.get_slice(name).get_dtype() in QUANTIZED
                ]
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{file} cannot be read: {error}; check its permissions, or copy it again"
            ) from error
        if quantized:
            raise ConfigError(f"{file}: {quantized[0]} is quantized; give the original weights")


def _indexed(folder: Path) -> set[str]:
    """Return the names of the files that the index of a sharded checkpoint lists."""
    if not (folder / INDEX).is_file():
        return set()
    try:
        return set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / INDEX} cannot be read: {error!r}; copy it again") from error


def load_model(
    folder: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    *,
    verified: bool = False,
) -> PreTrainedModel:
    """Return the model of a config from `load_config`, with paged attention.

    verified: the same files have passed all checks before, and their matrices will not be read.
    Raises ConfigError that names every tensor which is missing, left over or misshapen, and the
    first that is not finite.
    """
    if not verified:
        check_weights(folder)
    if talker.is_talker(config):
        found, mapping, takes_whole = talker.reader_of(config)
        read = _whole_config(folder) if takes_whole else config
        whole = _load(folder, found, read, dtype, key_mapping=mapping)
        return prepare(talker.talker_of(whole, config), verified=verified)
    outer = _read_config(folder)
    if composite.is_composite(outer):
        if quantized.is_quantized(folder, outer) or quantized.is_quantized(folder, config):
            raise ConfigError(
                f"{folder}: quantized weights of a composite model are not read; give the original ones"
            )
        whole = _load(folder, composite.without_towers(composite.whole_class(outer)), outer, dtype)
        return prepare(composite.language_part(whole, config), verified=verified)
    found = find_class(config)
    if quantized.is_quantized(folder, config):
        loaded = quantized.load(folder, config, found, dtype, verified=verified)
        return prepare(loaded, verified=verified)
    return prepare(_load(folder, found, config, dtype), verified=verified)


def _load(
    folder: Path,
    found: Any,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    key_mapping: dict[str, str] | None = None,
) -> PreTrainedModel:
    """Return a model of the class `found`. Raises ConfigError that names what does not fit."""
    _check_readable(folder)
    disable_progress_bar()  # stderr is the service's log
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
            key_mapping=key_mapping,
        )
    except UNUSABLE as error:
        raise ConfigError(
            f"{folder}: transformers cannot make {found.__name__} of it: {error!r}"
        ) from error
    if faults := [*_faults(report), *_untied(model)]:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise ConfigError(f"{folder}: the weights contradict config.json: {shown}")
    value: PreTrainedModel = model.eval().requires_grad_(False)
    return value


def _faults(report: dict[str, Any]) -> list[str]:
    """Return the faults that transformers reported when it loaded a checkpoint."""
    faults = [f"missing {name}" for name in sorted(report["missing_keys"])]
    faults += [f"unknown {name}" for name in sorted(report["unexpected_keys"])]
    faults += [
        f"{name} is {list(has)}, not {list(wants)}"
        for name, has, wants in sorted(report["mismatched_keys"])
    ]
    return faults + [str(message) for message in report.get("error_msgs") or ()]


def prepare(model: PreTrainedModel, *, verified: bool = False) -> PreTrainedModel:
    """Install mixers and attention for packed rows. Raises ConfigError for an unsupported model.

    verified: the model was examined before, and nothing had to be changed.
    """
    mixers.install_recurrent(model)
    if not verified:
        support.examine(model, min(exact_range(model.config) or UNLIMITED, UNLIMITED))
    support.use(model, attention.NAME, attention.paged_attention)
    mixers.install_latent(model)
    return model


def backbone(model: PreTrainedModel) -> nn.Module:
    """Return the module that computes the last hidden states.

    It is the base model, or its decoder where the head calls that itself. A class whose prefix
    belongs to a larger model (Llama 4's) names itself as its base; its `model` is meant then.
    """
    base = model.base_model if model.base_model is not model else getattr(model, "model", model)
    inner = getattr(base, "decoder", None)
    value: nn.Module = inner if isinstance(inner, PreTrainedModel) else base
    return value


def _untied(model: PreTrainedModel) -> list[str]:
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if (
        not getattr(model.config, "tie_word_embeddings", False)
        or head is None
        or head.weight is embeddings.weight
    ):
        return []
    return ["tie_word_embeddings=true, but the two matrices differ"]


def eos_ids(folder: Path, config: PreTrainedConfig) -> frozenset[int]:
    """Return the stop tokens of generation_config.json, or of config.json if it has none."""
    if talker.is_talker(config):
        return talker.end_codes(config)
    eos = getattr(config, "eos_token_id", None)
    if os.path.isfile(folder / "generation_config.json"):
        try:
            eos = (
                GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id or eos
            )
        except UNUSABLE as error:
            raise ConfigError(
                f"{folder}/generation_config.json cannot be read: {error}; copy it again"
            ) from error
    return frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos)
