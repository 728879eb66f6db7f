"""Load the processor of a checkpoint: transformers' own, without the parts that are not needed.

A processor consists of a tokenizer and of parts for pictures, video and sound. Those for video are
left out: they need torchvision, and videos are decoded elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.processing_utils import MODALITY_TO_AUTOPROCESSOR_MAPPING

from motet_models.processors import without_videos
from motet_shared.errors import ConfigError


def load_processor(folder: Path, config: PreTrainedConfig) -> Any:
    """Return the processor for `config`. Raises ConfigError for a family without one."""
    found = processor_class(config)
    if found is None:
        raise ConfigError(
            f"model={str(folder)!r}: transformers has no processor for {config.model_type!r}"
        )
    return found.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def processor_class(config: PreTrainedConfig) -> Any:
    """Return transformers' processor class, which may lack a part; None for a family without one."""
    # A model that thinks and speaks shares its processor with its part that thinks.
    whole = CONFIG_MAPPING_NAMES.get(config.model_type.removesuffix("_thinker"))
    kind = type(config) if whole is None else getattr(transformers, whole)
    if kind not in PROCESSOR_MAPPING:
        return None
    found: Any = PROCESSOR_MAPPING[kind]
    return without_videos(found, MODALITY_TO_AUTOPROCESSOR_MAPPING)
