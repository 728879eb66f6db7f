"""Summarize a checkpoint folder for lists of models: family, parameters and bytes of weights."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from motet_models.model_config import count_safetensors, read_config
from motet_shared.errors import ConfigError


class CheckpointSummary(TypedDict):
    """Fields of a `ModelCard`. parameters: elements of the safetensors; 0: unknown."""

    family: str
    parameters: int
    weights: int


def summarize(folder: Path) -> CheckpointSummary:
    """Return the summary of a folder; what cannot be read is empty or 0."""
    try:
        family, parameters = str(read_config(folder)["model_type"]), count_safetensors(folder)
    except ConfigError:
        family, parameters = "", 0
    files = [path for path in folder.glob("*") if path.suffix in (".safetensors", ".gguf")]
    weights = sum(path.stat().st_size for path in files)
    return CheckpointSummary(family=family, parameters=parameters, weights=weights)
