"""Make the model card of an engine's model from its folder, without weights and libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from motet_models.context import trained_context
from motet_shared.errors import ConfigError
from motet_shared.messages import ModelCard

from .config import EnginesConfig
from .engine import Features, Served


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json. Raises ConfigError."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model: cannot read {str(folder / 'config.json')!r}: {error}", param="model"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"model: {str(folder / 'config.json')!r} is no object", param="model")
    return config


def read_text_config(folder: Path) -> dict[str, Any]:
    """Return the part of config.json that describes the language model. Raises ConfigError."""
    config = read_config(folder)
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def model_cards(config: EnginesConfig, served: Served, features: Features) -> list[ModelCard]:
    """Return the model's card, then those of its adapters.

    The context is the least of the model's, the engine's and the setting.
    """
    folder = Path(config.model)
    contents = read_text_config(folder)
    limits = [trained_context(contents) or 0, served.context, config.context]
    card = ModelCard(
        name=config.model_name,
        context=min([limit for limit in limits if limit > 0], default=0),
        created=int((folder / "config.json").stat().st_mtime),
        vocab_size=int(contents.get("vocab_size") or 0),
        takes_chats=not features.raw_prompts,
        target=config.target or config.engine,
        rank=config.rank,
        refuses_images=features.pictures is None,
        takes_images=features.pictures is not None,
    )
    return [card, *(_adapter(name, card) for name in served.adapters)]


def _adapter(name: str, card: ModelCard) -> ModelCard:
    return replace(card, name=name, parent=card.name)
