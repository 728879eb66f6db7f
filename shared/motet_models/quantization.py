"""Read from a config.json in which codes a quantized checkpoint keeps its matrices.

The engine keeps codes of 4 and 8 bits as they are. On CPUs scales take 16 bits where that is exact,
and shifts, which come of zero points, 32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from motet_shared.errors import ConfigError

from .weight_formats import CheckpointCodes, WeightFormat

Settings = Mapping[str, Any]
_EXACT, _WIDE = 2, 4  # bytes of a scale that is exact in 16 bits, and of another or a shift
# Parts by names of modules, and the last names of modules that are never in codes.
_PARTS = {
    "attention": re.compile(r"\b(self_)?(attn|attention)\b"),
    "mlp": re.compile(r"\b(mlp|feed_forward)\b(?!.*experts)"),
    "experts": re.compile(r"\bexperts\b"),
}
_SMALL = re.compile(r"(norm|\bgate|router)$")


def codes_of(config: Mapping[str, Any]) -> CheckpointCodes | None:
    """Return the codes of the checkpoint with this config.json; None if it has plain weights.

    Raises ConfigError for a method that is not read, and for settings without numbers.
    """
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping):
        return None
    method = settings.get("quant_method")
    read = METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        raise ConfigError(
            f"quantization_config.quant_method={method!r} is not read; give one of"
            f" {', '.join(METHODS)}, a GGUF file, or the original weights",
            param="quant_method",
        )
    format = read(settings)
    parts = ("experts",) if method == "mxfp4" else _parts(settings, config)
    return CheckpointCodes(format=format, parts=parts)


def _parts(settings: Settings, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parts in codes: all but those that the settings leave out in most layers."""
    left_out = settings.get("modules_to_not_convert") or settings.get("ignore") or ()
    names = [name for name in left_out if isinstance(name, str) and not _SMALL.search(name)]
    layers = config.get("num_hidden_layers")
    most = layers // 2 if isinstance(layers, int) else 0
    every = CheckpointCodes(format=WeightFormat(name="", bits=0)).parts
    return tuple(part for part in every if _left_out(part, names, most) <= most)


def _left_out(part: str, names: list[str], layers: int) -> int:
    """Return in how many places a part is left out; a pattern ("re:…") stands for all layers."""
    pattern = _PARTS.get(part)
    found = [name for name in names if pattern is not None and pattern.search(name)]
    return sum(layers + 1 if name.startswith("re:") else 1 for name in found)


def _gptq(settings: Settings) -> WeightFormat:
    return _grouped(
        "gptq",
        _number(settings, "bits"),
        settings.get("group_size", 128),
        _EXACT if settings.get("sym", True) else _EXACT + _WIDE,
    )


def _awq(settings: Settings) -> WeightFormat:
    group = settings.get("group_size", settings.get("q_group_size", 128))
    return _grouped("awq", 4, group, _EXACT + _WIDE)


def _fp8(settings: Settings) -> WeightFormat:
    block = settings.get("weight_block_size")
    return _grouped("fp8", 8, block[1] if block else -1, _WIDE)


def _bits_and_bytes(settings: Settings) -> WeightFormat:
    if settings.get("load_in_8bit"):
        return _grouped("bitsandbytes int8", 8, -1, _WIDE)
    kind = settings.get("bnb_4bit_quant_type", "fp4")
    return _grouped(f"bitsandbytes {kind}", 4, settings.get("bnb_4bit_blocksize", 64), _WIDE)


def _mxfp4(settings: Settings) -> WeightFormat:
    return _grouped("mxfp4", 4, 32, _EXACT)


def _compressed(settings: Settings) -> WeightFormat:
    groups = settings.get("config_groups")
    first: Any = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ConfigError(
            "quantization_config.config_groups: no weights are described; repair config.json",
            param="config_groups",
        )
    structure = weights.get("block_structure")
    group = structure[1] if structure else weights.get("group_size") or -1
    if weights.get("type") == "float":
        return _grouped("compressed-tensors float", _number(weights, "num_bits"), group, _WIDE)
    scale = _EXACT if weights.get("symmetric", True) else _EXACT + _WIDE
    return _grouped("compressed-tensors int", _number(weights, "num_bits"), group, scale)


def _number(settings: Settings, name: str) -> int:
    value = settings.get(name)
    if value not in (4, 8):
        raise ConfigError(
            f"quantization_config.{name}={value!r}: 4 and 8 are read; give such a checkpoint",
            param=name,
        )
    return int(value)


def _grouped(name: str, bits: int, group: Any, scale: int) -> WeightFormat:
    """Return a format with `scale` bytes per group of inputs; group -1: per output."""
    if not isinstance(group, int) or group < -1 or group == 0:
        raise ConfigError(
            f"quantization_config: groups of {group!r} inputs; give -1 or a positive number",
            param="group_size",
        )
    if group == -1:
        return WeightFormat(name=name, bits=bits, row_bytes=scale)
    return WeightFormat(name=name, bits=bits, group=group, group_bytes=scale)


METHODS: dict[str, Callable[[Settings], WeightFormat]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "bitsandbytes": _bits_and_bytes,
    "mxfp4": _mxfp4,
}
