"""Divide a worker's memory among weights, states, a step's intermediates and the KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from motet_kernels.runtime import device as devices
from motet_llm.config import EngineConfig
from motet_models.capacity import (
    KV_FORMATS,
    Settings,
    activation_bytes,
    format_bytes,
    layout_of,
)
from motet_models.free_memory import available_memory
from motet_models.graph_sizes import StepShape, graph_bytes, graph_sizes
from motet_models.model_config import count_safetensors, model_shape, read_config
from motet_models.model_shape import ModelShape
from motet_models.omni import Stage, is_omni, stage_tensors
from motet_models.weight_formats import WEIGHT_FORMATS, weight_bytes
from motet_shared.errors import ConfigError

_WIDEST = 4  # times the hidden size: the widest product of a family that cannot be counted


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Hold the memory that a worker may use, measured before the model is loaded; sizes in bytes.

    field: the setting that bounds it, `memory` or `memory_share`.
    """

    total: int
    free: int
    field: str

    @classmethod
    def measure(cls, config: EngineConfig, device: torch.device) -> MemoryBudget:
        """Return the budget of `config`: `memory`, else `memory_share` of what is free now."""
        free = available_memory() if device.type == "cpu" else devices.free_memory(device)
        if config.memory:
            return cls(total=config.memory, free=free, field="memory")
        return cls(total=int(free * config.memory_share), free=free, field="memory_share")

    def describe(self) -> str:
        """Return for people how much memory there is, and how much of it the model may use."""
        return f"{format_bytes(self.total)} of {format_bytes(self.free)} free"

    def check_weights(self, nbytes: int) -> None:
        """Raise ConfigError if weights of that size leave nothing of the budget."""
        if nbytes >= self.total:
            raise self._too_small(f"the weights take {format_bytes(nbytes)}")

    def left(self, *, weights: int, states: int, step: int) -> int:
        """Return the bytes for KV caches; step: intermediates of the largest step.

        Raises ConfigError if the others leave nothing.
        """
        left = self.total - weights - states - step
        if left <= 0:
            raise self._too_small(
                f"weights take {format_bytes(weights)}, recurrent states {format_bytes(states)} and"
                f" a step {format_bytes(step)}"
            )
        return left

    def too_small_for_block(self, block_bytes: int) -> ConfigError:
        """Return the error for a budget whose rest does not hold one block of the KV cache."""
        return self._too_small(
            f"besides weights and states no block of {format_bytes(block_bytes)} fits"
        )

    def _too_small(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{self.field}: the model may use {format_bytes(self.total)} of {format_bytes(self.free)}"
            f" that are free, but {reason}; give more memory, smaller weights (weights=int8 or"
            " int4), a smaller max_running or token_budget, or a smaller model",
            param=self.field,
        )


def expected_weight_bytes(
    folder: Path, weights: str, quantized: bool, stage: Stage = "thinker"
) -> int:
    """Return the bytes of a checkpoint's weights in memory, before they are loaded.

    weights: the format of matrices. quantized: the checkpoint's own codes are kept, so that its
        files have about the size of its weights in memory. stage: of an omni model.
    """
    if weights in WEIGHT_FORMATS and is_omni(read_config(folder)):
        elements = count_safetensors(folder, stage_tensors(stage))
        return WEIGHT_FORMATS[weights].matrix_bytes(elements, 0)
    shape = None if quantized else _shape(folder)
    if shape is None or weights not in WEIGHT_FORMATS:
        return sum(path.stat().st_size for path in _weight_files(folder))
    return weight_bytes(shape, WEIGHT_FORMATS[weights])


def step_bytes(config: EngineConfig, hidden: int, vocab: int, element_bytes: int) -> int:
    """Return the most bytes that a step allocates besides its results in the caches.

    hidden, vocab: sizes, used for a family whose shape is not known. element_bytes: of a number.
    """
    settings = Settings(
        activation_bytes=element_bytes,
        token_budget=config.token_budget,
        max_running=config.max_running,
    )
    shape = _shape(Path(config.model))
    if shape is not None:
        return activation_bytes(shape, settings)
    rows = config.token_budget * (4 + 2 * _WIDEST) * hidden * element_bytes
    return rows + 2 * config.max_running * vocab * 4


def graph_memory(config: EngineConfig, step: StepShape, context: int) -> int:
    """Return the most bytes that decode steps take as CUDA graphs.

    step: `widest` is not read: it is the model's if its shape is known, else a multiple of its
        hidden size. context: longest sequence, tokens.
    """
    shape = _shape(Path(config.model))
    widest = _WIDEST * step.hidden if shape is None else shape.widest
    sizes = graph_sizes(config.max_running, context, config.block_size)
    return graph_bytes(sizes, replace(step, widest=widest), config.block_size)


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """Describe what a draft model takes of the budget: weights, and bytes per block of the target."""

    weights: int = 0
    per_block: int = 0


def draft_memory(config: EngineConfig, kv_format: str, groups: int) -> DraftMemory:
    """Return what the draft model of `config.speculate` will take, before it is loaded.

    Its cache has as many blocks per group as the target's. kv_format: name of a type of the KV
    cache. groups: groups of layers of the target. Heads and families that cannot be counted are
    taken for their files alone.
    """
    if config.speculate in ("off", "ngram"):
        return DraftMemory()
    folder = Path(config.speculate)
    shape, kv = _shape(folder), KV_FORMATS.get(kv_format)
    weights = expected_weight_bytes(folder, "", quantized=True)
    if shape is None or kv is None:
        return DraftMemory(weights=weights)
    layout = layout_of(shape.layers, config.block_size, kv)
    return DraftMemory(weights, layout.block_bytes * len(layout.groups) // groups)


def _weight_files(folder: Path) -> list[Path]:
    return [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]


def _shape(folder: Path) -> ModelShape | None:
    """Return the model's shape; None for a family that cannot be counted."""
    try:
        return model_shape(read_config(folder), folder)
    except ConfigError:
        return None
