"""Divide the main memory of this machine among the engines of `motet up` that compute on its CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from motet_models.capacity import format_bytes
from motet_models.free_memory import available_memory
from motet_shared.errors import ConfigError

# Variables of an engine that bound its memory; they take precedence over a division.
BOUNDS = ("MOTET_MEMORY", "MOTET_KV_MEMORY", "MOTET_NUM_BLOCKS")


@dataclass(frozen=True, kw_only=True)
class MemoryDivision:
    """Divide memory among the engines: each gets its weights, and an equal part of the rest.

    share: share of the free memory.
    free: free bytes at the start.
    total: bytes for all engines.
    engines: folder of each engine's model, one entry per process.
    """

    share: float
    free: int
    total: int
    engines: tuple[Path, ...]

    @classmethod
    def measure(
        cls,
        share: float,
        engines: Sequence[Path],
        others: Sequence[Path],
        free: int | None = None,
    ) -> MemoryDivision:
        """Return the division of `share` of the free memory, less other models' weights.

        others: folders of those models. free: bytes; None: those that are free now. Raises
        ConfigError for a share outside (0, 1].
        """
        if not 0 < share <= 1:
            raise ConfigError(
                f"--memory-share: {share} is out of range; give more than 0, up to 1",
                param="--memory-share",
            )
        free = available_memory() if free is None else free
        total = max(0, int(share * free) - sum(map(checkpoint_bytes, others)))
        return cls(share=share, free=free, total=total, engines=tuple(engines))

    def arguments(self, model: Path, env: Mapping[str, str] | None = None) -> list[str]:
        """Return the arguments that bound an engine of `model`; empty if the user has set a bound."""
        env = os.environ if env is None else env
        if any(env.get(name) for name in BOUNDS):
            return []
        return ["--memory", str(self.bytes_of(model))]

    def describe(self) -> str:
        """Return a line for the log."""
        return (
            f"language models may use {format_bytes(self.total)} of {format_bytes(self.free)} of free"
            f" memory (--memory-share {self.share:g})"
        )

    def bytes_of(self, model: Path) -> int:
        """Return the bytes that an engine of `model` may use."""
        weights = [checkpoint_bytes(folder) for folder in self.engines]
        rest = self.total - sum(weights)
        if rest <= 0:  # quantized on load they may still fit, which the engines check
            return max(1, self.total // len(self.engines))
        return checkpoint_bytes(model) + rest // len(self.engines)


def checkpoint_bytes(folder: Path) -> int:
    """Return the bytes of a checkpoint's weights on disk, subfolders included."""
    files = [folder] if folder.is_file() else folder.rglob("*")
    return sum(path.stat().st_size for path in files if path.suffix in (".safetensors", ".gguf"))
