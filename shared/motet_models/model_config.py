"""Derive the shape of a model from its config.json, without weights and without torch.

A family that `model_families` does not know is refused by name, unless the folder has safetensors
whose headers give the parameter count.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from motet_shared.errors import ConfigError

from .model_counter import ConfigFields, ParameterCounter
from .model_families import FAMILIES, Family
from .model_shape import ModelShape
from .omni import stage_config

# Language models within others, which transformers has no class of their own for.
_SAME_AS = {"qwen2_5_omni_text": "qwen2", "qwen3_omni_moe_text": "qwen3_moe"}


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint folder's config.json.

    Raises ConfigError if it is missing, unreadable or has no model_type.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{folder}: has no config.json; give the folder of a checkpoint"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{path} has no model_type; give the folder of a model")
    return config


def model_shape(config: Mapping[str, Any], folder: Path | None = None) -> ModelShape:
    """Return the shape of the model that `config` (the contents of a config.json) describes.

    For a multimodal model this is the shape of its text part, for an omni model that of its thinker's.
    folder: where to find safetensors if
    the family is unknown; their headers then give the number of parameters, all counted as active.
    Raises ConfigError for a family that cannot be counted and for missing or invalid fields.
    """
    config = stage_config(config)
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, dict) and "model_type" in text else config
    kind = str(config["model_type"])
    kind = _SAME_AS.get(kind, kind)
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"model_type={kind!r}: it is an encoder-decoder, which is not served")
    if kind in FAMILIES:
        return ParameterCounter(
            ConfigFields(config, FAMILIES[kind].defaults), FAMILIES[kind]
        ).shape()
    if folder is not None and (total := count_safetensors(folder)):
        shape = ParameterCounter(ConfigFields(config, {}), Family()).shape()
        return _with_total(shape, total)
    raise ConfigError(
        f"model_type={kind!r}: its parameters cannot be counted from config.json; "
        "give a folder that has the *.safetensors too"
    )


def count_safetensors(folder: Path, prefixes: tuple[str, ...] = ("",)) -> int:
    """Return the number of elements in the folder's *.safetensors, from their headers.

    prefixes: of the tensors that are counted. Returns 0 if there are none; raises ConfigError for an unreadable file.
    """
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
        except (OSError, ValueError, struct.error) as error:
            raise ConfigError(f"{path} cannot be read: {error}; copy it again") from error
        total += sum(
            math.prod(entry["shape"])
            for name, entry in header.items()
            if name != "__metadata__" and name.startswith(prefixes)
        )
    return total


def _with_total(shape: ModelShape, total: int) -> ModelShape:
    """Return `shape` with the counted total.

    Parameters other than embeddings and lm_head are assigned to `mlp`. Raises ConfigError if
    `total` is too small.
    """
    given = shape.parameters
    rest = total - given.embeddings - given.lm_head
    if rest < 0:
        raise ConfigError(
            f"the safetensors have {total} elements, fewer than the embeddings that config.json describes"
        )
    parameters = replace(
        given, attention=0, recurrent=0, experts=0, active_experts=0, norms=0, mlp=rest,
        matrices=total if given.tied else total - given.embeddings,
    )  # fmt: skip
    return replace(shape, parameters=parameters, expert_share=1.0)
