"""Which models can be served now: those that a ready tokenizer and a ready decode instance announce.

Of a model's adapters decode alone knows; the tokenizer's part is that of the model.
"""

from __future__ import annotations

from msgspec.structs import replace

from motet_shared.discovery import Directory
from motet_shared.errors import Unavailable, UnknownModel
from motet_shared.messages import ModelCard

CHAT_ROLES = ("tokenizer", "decode")


def servable(directory: Directory) -> dict[str, ModelCard]:
    """Cards of the models that can answer now, by name, and behind them those of their adapters."""
    known, decoded = ({c.name: c for beat in directory.ready(role) for c in beat.models} for role in CHAT_ROLES)
    models = {name: card for name, card in sorted(known.items()) if name in decoded}
    adapters = {
        name: replace(models[card.parent], name=name, parent=card.parent, created=card.created)
        for name, card in sorted(decoded.items())
        if card.parent in models and name not in models
    }
    return models | adapters


def missing(directory: Directory) -> list[str]:
    """The roles without a ready instance; empty when something may be served."""
    return [role for role in CHAT_ROLES if not directory.ready(role)]


def check_known(directory: Directory, model: str) -> None:
    """UnknownModel if services are there and none announces `model`; Unavailable while nobody can know."""
    beats = [beat for role in CHAT_ROLES for beat in directory.instances(role)]
    names = sorted({card.name for beat in beats for card in beat.models})
    if model in names:
        return
    if missing(directory):
        raise Unavailable(f"model {model!r}: no {' and no '.join(missing(directory))} is ready yet", param="model")
    message = f"model {model!r} does not exist here; there are: {', '.join(names) or 'none'}"
    raise UnknownModel(message, param="model")


def sees(directory: Directory, model: str) -> bool:
    """Whether chats with a model may hold pictures; as long as nobody can know, they may."""
    base = directory.base_of(model)
    cards = [card for beat in directory.ready("tokenizer") for card in beat.models if card.name == base]
    return not cards or any(card.images for card in cards)


def without_eyes(directory: Directory) -> list[str]:
    """Models that can be served, and see, but for which no vision instance is ready."""
    cards = servable(directory).values()
    return [c.name for c in cards if c.images and not directory.ready("vision", model=c.parent or c.name)]
