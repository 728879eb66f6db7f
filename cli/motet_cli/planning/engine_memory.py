"""Compute the memory of an engine from its checkpoint's config.json and the settings of a command."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from motet_models.capacity import KV_FORMATS, Plan, Settings, plan
from motet_models.gguf_tensors import codes_of_tensors, read_tensors
from motet_models.model_config import model_shape, read_config
from motet_models.quantization import codes_of
from motet_models.weight_formats import WEIGHT_FORMATS, CheckpointCodes, WeightFormat
from motet_shared.errors import ConfigError

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
_ALIASES = {"bf16": "bfloat16", "fp32": "float32", "float8_e4m3fn": "float8"}
# Bytes of an engine process besides the model. CPU: Python with torch and transformers, and memory
# that the allocator keeps (measured). GPU: the CUDA context, cuBLAS workspaces, the allocator's slack.
CPU_OVERHEAD = 456 << 20
GPU_OVERHEAD = 1536 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Hold what is known of a checkpoint's weights: its config.json, and its GGUF file if it has one."""

    config: dict[str, Any]
    gguf: Path | None = None

    def dtype(self, on_gpu: bool) -> str:
        """Return the format of matrices and caches that the engine takes for "auto".

        Configs that state no type are taken for those of bfloat16, in which nearly all models are
        published.
        """
        stated = str(self.config.get("dtype") or self.config.get("torch_dtype") or "bfloat16")
        if on_gpu:
            return "bfloat16"
        return "bfloat16" if stated.removeprefix("torch.") == "bfloat16" else "float32"

    def codes(self, format: WeightFormat, on_gpu: bool) -> CheckpointCodes | None:
        """Return the codes that stay as they are; format: of the other matrices."""
        if self.gguf is None:
            return codes_of(self.config)
        return codes_of_tensors(read_tensors(self.gguf), format, on_gpu=on_gpu)


def engine_plan(args: Namespace, folder: Path, memory: int, *, on_gpu: bool = False) -> Plan:
    """Return the plan of an engine of the model in `folder`, for sequences of at most 4,096 tokens.

    args: settings, as of the command line. Raises ConfigError if they do not fit into `memory`.
    """
    config = read_config(folder)
    checkpoint = Checkpoint(config, next(folder.glob("*.gguf"), None))
    shape = model_shape(config, folder)
    settings = engine_settings(args, checkpoint, on_gpu=on_gpu)
    return plan(shape, settings, memory, min(shape.context or 4096, 4096))


def engine_settings(args: Namespace, checkpoint: Checkpoint, on_gpu: bool) -> Settings:
    """Return the settings of an engine that a command line describes. Raises ConfigError."""
    overhead = (
        parse_bytes(args.overhead, "--overhead")
        if args.overhead
        else GPU_OVERHEAD
        if on_gpu
        else CPU_OVERHEAD
    )
    for name, low in (("block_size", 1), ("token_budget", 1), ("max_running", 1)):
        if getattr(args, name) < low:
            raise ConfigError(
                f"--{name.replace('_', '-')}: {getattr(args, name)} is too few; give at least {low}",
                param=f"--{name.replace('_', '-')}",
            )
    own = checkpoint.dtype(on_gpu)
    weights = WEIGHT_FORMATS[
        _ALIASES.get(args.weights, own if args.weights == "auto" else args.weights)
    ]
    # Embeddings keep the checkpoint's type.
    weights = replace(weights, table_bytes=WEIGHT_FORMATS[own].table_bytes)
    kv = own if args.kv_dtype == "auto" else args.kv_dtype
    return Settings(
        weights=weights,
        codes=checkpoint.codes(weights, on_gpu),
        kv=KV_FORMATS[_ALIASES.get(kv, kv)],
        activation_bytes=2 if on_gpu else 4,
        block_size=args.block_size,
        token_budget=args.token_budget,
        max_running=args.max_running,
        prefix_cache=not args.no_prefix_cache,
        cuda_graphs=args.cuda_graphs and on_gpu,
        overhead=overhead,
    )


def parse_bytes(text: str, name: str) -> int:
    """Parse bytes: "24GB" (10^9 each), "24GiB" (2^30 each), "500M", "7". Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise ConfigError(
            f"{name}: {text!r} is not a number of bytes; give one such as 24GB or 24GiB", param=name
        )
    return int(float(match[1]) * _UNITS[match[2]])
