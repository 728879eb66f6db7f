"""Derive config.json from the metadata of a GGUF file.

llama.cpp's keys are listed in `gguf.constants.Keys`. What a file does not state is what
transformers' config class has by default; what only the tensors tell (tied tables, biases,
frequency factors) is read from them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from motet_shared.errors import ConfigError

from .architectures import find_architecture
from .header import Header, TensorPlace
from .values import PLAIN, read_plain

# The largest plain tensor that is read to see which type its numbers fit into.
_SMALL = 1 << 20
_SPECIAL = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "padding_token_id",
}
_NOT_EVERYWHERE = {"intermediate_size", "num_key_value_heads", "head_dim", "rms_norm_eps"}


def config_of(header: Header) -> dict[str, Any]:
    """Return the contents of the config.json that a file stands for.

    Raises ConfigError for an architecture that is not read, and for missing metadata.
    """
    architecture = find_architecture(header)
    config = {**_common(header), **architecture.config(header)}
    rope = {**_rope(header, config), **config.pop("rope", {})}
    if architecture.rotates and "rope_parameters" not in config:
        config["rope_parameters"] = rope
    return _in_its_words(config)


def _in_its_words(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields by the names that the config class has for them, without unknown sizes."""
    found: Any = CONFIG_MAPPING[config["model_type"]]
    own, known = found.attribute_map, set(found.__dataclass_fields__)
    return {
        own.get(key, key): value
        for key, value in config.items()
        if value is not None and (key not in _NOT_EVERYWHERE or own.get(key, key) in known)
    }


def _common(header: Header) -> dict[str, Any]:
    """Return what all decoders of transformers call by the same names."""
    header.need("attention.head_count")
    heads = _number(header, "attention.head_count")
    specials = {key: header.fields.get(f"tokenizer.ggml.{name}") for key, name in _SPECIAL.items()}
    return {
        **specials,
        "dtype": _dtype(header),
        "vocab_size": _vocabulary(header),
        "hidden_size": header.need("embedding_length"),
        "intermediate_size": _number(header, "feed_forward_length"),
        "num_hidden_layers": header.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.get("attention.head_count_kv", heads),
        "head_dim": header.get("attention.key_length"),
        "max_position_embeddings": header.need("context_length"),
        "rms_norm_eps": header.get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def _number(header: Header, key: str) -> Any:
    """Return a value that all layers share, if the file states it.

    Raises ConfigError if it lists one per layer.
    """
    value = header.get(key)
    if isinstance(value, list):
        raise ConfigError(
            f"{header.path.name}: {header.architecture}.{key} differs between layers, which "
            "transformers has no class for; give a file of another model"
        )
    return value


def _vocabulary(header: Header) -> int:
    """Return the rows of the embedding table, which may be more than there are tokens."""
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ConfigError(
            f"{header.path.name}: token_embd.weight is missing; it is no language model"
        )
    return table.shape[0]


def _dtype(header: Header) -> str:
    """Return the dtype of the unquantized tensors.

    float16 if a matrix has it, else bfloat16 if it holds the small tensors exactly, else float32.
    """
    places = [place for place in header.tensors.values() if place.kind in PLAIN]
    kinds = {place.kind for place in places if len(place.shape) > 1}
    if "F16" in kinds:
        return "float16"
    small = [place for place in places if _elements(place) <= _SMALL]
    if all(_fits_bfloat16(read_plain(place)) for place in small):
        return "bfloat16"
    return "float32"


def _elements(place: TensorPlace) -> int:
    return int(torch.tensor(place.shape).prod())


def _fits_bfloat16(values: Tensor) -> bool:
    return torch.equal(values.float().bfloat16().float(), values.float())


# ------------------------------------------------------------------------------- rotary embedding
def _rope(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` of the scaling that the file states, by keys or as a tensor."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": header.get("rope.freq_base", 10000.0),
    }
    original = header.get("rope.scaling.original_context_length")
    factor, kind = header.get("rope.scaling.factor"), header.get("rope.scaling.type", "none")
    if (factors := header.tensors.get("rope_freqs.weight")) is not None:
        return rope | _by_frequency(read_plain(factors), config["max_position_embeddings"])
    if "rope_factors_long.weight" in header.tensors:
        return rope | _long(header, original or config["max_position_embeddings"])
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return rope | _yarn(header, factor, original)
    if kind not in ("none", "longrope"):
        raise ConfigError(
            f"{header.path.name}: rope.scaling.type={kind!r}: none, linear, yarn and longrope are read"
        )
    return rope


def _yarn(header: Header, factor: float, original: int | None) -> dict[str, Any]:
    yarn: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    stated = {
        "original_max_position_embeddings": original,
        "attention_factor": header.get("rope.scaling.yarn_attn_factor"),
        "beta_fast": header.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": header.get("rope.scaling.yarn_beta_slow"),
    }
    return yarn | {key: value for key, value in stated.items() if value is not None}


def _long(header: Header, original: int) -> dict[str, Any]:
    """Return Phi-3's two lists of factors, for contexts up to `original` tokens and beyond."""
    lists = {
        f"{length}_factor": read_plain(header.tensors[f"rope_factors_{length}.weight"]).tolist()
        for length in ("long", "short")
    }
    long: dict[str, Any] = {"rope_type": "longrope", "original_max_position_embeddings": original}
    if (factor := header.get("rope.scaling.attn_factor")) is not None:
        long["attention_factor"] = factor
    return long | lists


def _by_frequency(factors_R: Tensor, context: int) -> dict[str, Any]:
    """Return factors by frequency, as Llama 3.1's converter writes them, whatever their rule."""
    factors = factors_R.float().tolist()
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }
