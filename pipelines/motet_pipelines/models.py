"""Which models can be served now: those that a ready tokenizer and a ready decode instance announce."""

from __future__ import annotations

from motet_shared.discovery import Directory
from motet_shared.errors import Unavailable, UnknownModel
from motet_shared.messages import ModelCard

CHAT_ROLES = ("tokenizer", "decode")


def servable(directory: Directory) -> dict[str, ModelCard]:
    """Cards of the models that can answer now, by name."""
    cards = [{card.name: card for beat in directory.ready(role) for card in beat.models} for role in CHAT_ROLES]
    return {name: card for name, card in sorted(cards[0].items()) if name in cards[1]}


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
    cards = [card for beat in directory.ready("tokenizer") for card in beat.models if card.name == model]
    return not cards or any(card.images for card in cards)


def without_eyes(directory: Directory) -> list[str]:
    """Models that can be served, and see, but for which no vision instance is ready."""
    cards = servable(directory).values()
    return [card.name for card in cards if card.images and not directory.ready("vision", model=card.name)]
