"""List the chat models that can be served: those announced by a ready tokenizer and a ready decode.

Adapters of a model are announced by decode alone; tokenizers announce the base model.
"""

from __future__ import annotations

from msgspec.structs import replace

from motet_shared.errors import Unavailable, UnknownModel
from motet_shared.messages import ModelCard
from motet_shared.wire.discovery import Directory
from motet_shared.wire.instances import served

CHAT_ROLES = ("tokenizer", "decode")


def servable(directory: Directory) -> dict[str, ModelCard]:
    """Return the cards of servable models by name, followed by those of their adapters.

    A model is servable if a tokenizer and decode are ready for it. Its context is the smaller of
    theirs; decode supplies family, parameters and bytes of weights.
    """
    known, decoded = (
        {c.name: c for beat in directory.ready(role) for c in beat.models} for role in CHAT_ROLES
    )
    models = {
        name: _joined(card, decoded[name], _refuses_images(directory, name))
        for name, card in sorted(known.items())
        if name in decoded
    }
    adapters = {
        name: replace(models[card.parent], name=name, parent=card.parent, created=card.created)
        for name, card in sorted(decoded.items())
        if card.parent in models and name not in models and not card.problem
    }
    return models | adapters


def _joined(known: ModelCard, decoded: ModelCard, refuses_images: bool) -> ModelCard:
    """Return the tokenizer's card of a model with what decode knows better."""
    return replace(
        known,
        context=min(known.context, decoded.context),
        images=known.images and not refuses_images,
        family=decoded.family,
        parameters=decoded.parameters,
        weights=decoded.weights,
    )


def missing(directory: Directory) -> list[str]:
    """Return the roles without a ready instance; empty if a model may be served."""
    return [role for role in CHAT_ROLES if not directory.ready(role)]


def check_known(directory: Directory, model: str) -> None:
    """Raise UnknownModel if instances announce models and `model` is none of them.

    Raises Unavailable while decode announces no model and a role has no ready instance. A tokenizer
    that is down makes no model unknown; adapters are known to decode alone. A model that is still
    to come, or that was lost and may return, is known.
    """
    beats = [beat for role in CHAT_ROLES for beat in directory.instances(role)]
    names = sorted({card.name for beat in beats for card in beat.models})
    if model in names or any(directory.is_coming(role, model) for role in CHAT_ROLES):
        return
    decoded = any(beat.models for beat in directory.instances("decode"))
    if missing(directory) and not decoded:
        raise Unavailable(
            f"model {model!r}: no {' and no '.join(missing(directory))} is ready yet", param="model"
        )
    message = f"model {model!r} does not exist here; there are: {', '.join(names) or 'none'}"
    raise UnknownModel(message, param="model")


def cards_of(directory: Directory, model: str) -> list[ModelCard]:
    """Return the ready tokenizers' cards of a model; for an adapter, those of its base model."""
    base = directory.base_of(model)
    return [c for beat in directory.ready("tokenizer") for c in beat.models if c.name == base]


def accepts_images(directory: Directory, model: str) -> bool:
    """Return True if chats with a model may hold pictures, or if no tokenizer announces it yet.

    They may not where all of its decode instances refuse them.
    """
    cards = cards_of(directory, model)
    return not cards or (
        any(card.images for card in cards) and not _refuses_images(directory, model)
    )


def _refuses_images(directory: Directory, model: str) -> bool:
    cards = _decode_cards(directory, model)
    return bool(cards) and all(card.refuses_images for card in cards)


def _decode_cards(directory: Directory, model: str) -> list[ModelCard]:
    """Return the cards of a model at the ready decode instances."""
    beats = directory.ready("decode", model=model)
    return [card for beat in beats for card in beat.models if card.name == model]


def accepts_audio(directory: Directory, model: str) -> bool:
    """Return True if chats with a model may hold sound, or if no tokenizer announces it yet."""
    cards = cards_of(directory, model)
    return not cards or any(card.audio for card in cards)


def hears(directory: Directory, model: str, *, coming: bool = False) -> bool:
    """Return True if a model accepts sound now: a tokenizer says so, and an encoder is ready.

    `coming`: an encoder that is starting or restarting counts, too.
    """
    base = directory.base_of(model)
    has_encoder = base in served(directory, "encoder") or (
        coming and directory.is_coming("encoder", base)
    )
    return has_encoder and any(card.audio for card in cards_of(directory, model))


def without_encoder(directory: Directory) -> list[str]:
    """Return the servable models that accept pictures or sound but have no ready encoder instance.

    Those whose decode instances all read the pictures themselves need none.
    """
    cards = servable(directory).values()
    return [
        c.name
        for c in cards
        if (c.images or c.audio)
        and not directory.ready("encoder", model=c.parent or c.name)
        and not all(card.takes_images for card in _decode_cards(directory, c.name))
    ]
