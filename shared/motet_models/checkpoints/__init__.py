"""Check the configs and weights of a checkpoint folder, before a service loads it.

Needs numpy but no torch. The service that loads the checkpoint checks family-specific constraints.
"""

from __future__ import annotations

import re
from pathlib import Path

from .numbers import check_numbers
from .weights import check_file, check_weights

__all__ = ["check_checkpoint", "check_file", "check_numbers", "check_weights"]


def check_checkpoint(folder: Path, without: re.Pattern[str] | None = None) -> None:
    """Raise ConfigError for a number or a weight in `folder` that no model can compute with.

    Reads the folder's own `*config.json` and `*.safetensors`, not its subfolders. The error names
    the file, the field or tensor, the value and the remedy. without: names of tensors to skip.
    """
    check_numbers(folder)
    check_weights(folder, without)
