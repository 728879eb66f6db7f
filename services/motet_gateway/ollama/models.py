"""Serve GET /api/tags, POST /api/show, GET /api/ps and GET /api/version.

Language and embedding models are listed; other kinds have no route of Ollama's that serves them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from motet_gateway.context import GatewayContext, Service
from motet_gateway.http.exchange import Exchange
from motet_gateway.openai.aliases import CHAT
from motet_gateway.openai.models import capabilities
from motet_pipelines.chat.models import servable
from motet_pipelines.embed import ROLE as EMBEDDING
from motet_shared import __version__
from motet_shared.errors import BadRequest, MotetError, UnknownModel
from motet_shared.messages import ModelCard
from motet_shared.wire.discovery import Directory
from motet_shared.wire.instances import served

from .names import chat_model, model_in
from .schema import PullBody, ShowBody, parse_show

_MOST_BODY = 2**16
_FOREVER = timedelta(seconds=(2**63 - 1) // 1_000_000_000)  # how Ollama says that a model stays
_SIZES = ((1e9, "B"), (1e6, "M"), (1e3, "K"))


async def list_models(service: Service) -> dict[str, Any]:
    """List what can answer: models that are ready, and those that are loaded on demand."""
    directory = service.bus.directory
    found = {card.name: _listed(role, card) for role, card in _ready(directory)}
    known = {card.name: card for beat in directory.ready("tokenizer") for card in beat.models}
    for role in ("decode", EMBEDDING):
        for offer in directory.presence.offers(role):
            card = known.get(offer.model) if role == "decode" else None
            found.setdefault(
                offer.model, _listed(role, card or ModelCard(name=offer.model, context=0))
            )
    return {"models": list(found.values())}


async def running_models(service: Service) -> dict[str, Any]:
    """List the models that are in memory."""
    directory = service.bus.directory
    found = []
    for role, card in _ready(directory):
        listed = _listed(role, card)
        del listed["modified_at"]
        found.append(
            listed
            | {
                "expires_at": _expiry(directory, role, card.parent or card.name),
                "size_vram": 0,
                "context_length": card.context,
            }
        )
    return {"models": found}


async def version() -> dict[str, str]:
    return {"version": __version__}


async def show_model(service: GatewayContext, http: Exchange) -> None:
    """Answer what is known of a model."""
    body = parse_show(await http.body(_MOST_BODY), http.hints("ollama"))
    role, card = _find(service, named(body))
    details = _details(card)
    shown = {
        "modelfile": f"FROM {card.name}\n",
        "parameters": "\n".join(f"{name} {value}" for name, value in _parameters(card)),
        "template": "",
        "details": details,
        "model_info": _model_info(card),
        "capabilities": _capabilities(role, card),
        "modified_at": _time(card.created),
    }
    await http.reply(200, msgspec.json.encode(shown))


def named(body: ShowBody | PullBody) -> str:
    """Return the model that a body names. Raises BadRequest for none."""
    name = body.model or body.name
    if not name:
        raise BadRequest("`model` is required", param="model")
    return name


def _find(service: GatewayContext, name: str) -> tuple[str, ModelCard]:
    """Return the role and the card of a model. Raises UnknownModel."""
    directory = service.bus.directory
    cards = {card.name: (role, card) for role, card in _ready(directory)}
    for role in (CHAT, EMBEDDING):
        try:
            found = chat_model(service, name) if role == CHAT else model_in(service, role, name)
        except MotetError:
            continue
        kind = "decode" if role == CHAT else role
        known = {c.name: c for beat in directory.ready("tokenizer") for c in beat.models}
        unloaded = known.get(found) or ModelCard(name=found, context=0)
        return cards.get(found, (kind, unloaded))
    names = ", ".join(cards) or "none"
    raise UnknownModel(f"model {name!r} does not exist here; available: {names}", param="model")


def _ready(directory: Directory) -> Iterator[tuple[str, ModelCard]]:
    for card in servable(directory).values():
        yield "decode", card
    for card in served(directory, EMBEDDING).values():
        yield EMBEDDING, card


def _listed(role: str, card: ModelCard) -> dict[str, Any]:
    return {
        "name": card.name,
        "model": card.name,
        "modified_at": _time(card.created),
        "size": card.weights,
        "digest": _digest(card),
        "details": _details(card),
        "capabilities": _capabilities(role, card),
    }


def _digest(card: ModelCard) -> str:
    """Return a digest that changes with the checkpoint: of its name, time and size."""
    text = f"{card.name}\0{card.created}\0{card.weights}\0{card.parameters}"
    return hashlib.sha256(text.encode()).hexdigest()


def _details(card: ModelCard) -> dict[str, Any]:
    return {
        "parent_model": card.parent,
        "format": "safetensors",
        "family": card.family,
        "families": [card.family] if card.family else [],
        "parameter_size": _short(card.parameters) if card.parameters else "",
        "quantization_level": _precision(card),
    }


def _short(count: int) -> str:
    for unit, letter in _SIZES:
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count)


def _precision(card: ModelCard) -> str:
    """Return the precision of plain weights; that of packed ones is not known here."""
    width = card.weights / card.parameters if card.parameters else 0.0
    return {2: "F16", 4: "F32"}.get(round(width), "") if width > 1.9 else ""


def _capabilities(role: str, card: ModelCard) -> list[str]:
    """Return what a model can do; Ollama has no word for chats."""
    return [word for word in capabilities(role, card) if word != "chat"]


def _parameters(card: ModelCard) -> list[tuple[str, float]]:
    """Return the recommended sampling by Ollama's names."""
    names = {"repetition_penalty": "repeat_penalty"}
    return [(names.get(name, name), value) for name, value in card.sampling.items()]


def _model_info(card: ModelCard) -> dict[str, Any]:
    family = card.family or "model"
    return {
        "general.architecture": card.family,
        "general.basename": card.name,
        "general.parameter_count": card.parameters,
        f"{family}.context_length": card.context,
        f"{family}.vocab_size": card.vocab_size,
    }


def _expiry(directory: Directory, role: str, model: str) -> str:
    """Return when a model is unloaded if no request comes."""
    offer = directory.presence.offer(role, model)
    left = _FOREVER if offer is None or offer.stay < 0 else timedelta(seconds=offer.stay)
    return _stamp(datetime.now(UTC) + left)


def _time(unix: int) -> str:
    return _stamp(datetime.fromtimestamp(unix, UTC))


def _stamp(when: datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")
