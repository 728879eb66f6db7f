"""Serve GET /v1/models and GET /v1/models/{id}.

The lists contain models that are ready, expected ones that are still starting, and those that are
loaded on demand. Anthropic's clients, which ask at the same paths, get the chat models in their
format.
"""

from __future__ import annotations

from typing import Any

import msgspec

from motet_gateway.anthropic import models as anthropic
from motet_gateway.context import GatewayContext
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.query import query_of
from motet_gateway.operations.loading import state_of
from motet_gateway.operations.readiness import KINDS
from motet_pipelines.chat.models import servable
from motet_shared.errors import UnknownModel
from motet_shared.messages import ModelCard, Offer
from motet_shared.wire.discovery import Directory
from motet_shared.wire.instances import served

_STATUS = {"ready": "ready", "loading": "loading", "clearing": "loading", "failed": "failed"}


async def list_models(service: GatewayContext, http: Exchange) -> None:
    """Answer all models; a page of the chat models to Anthropic's clients."""
    found: dict[str, Any] = {"object": "list", "data": _models(service)}
    if anthropic.is_asked(http.scope):
        query = query_of(http, anthropic.ModelsQuery, anthropic.LISTS)
        found = anthropic.models_page(found["data"], query)
    await http.reply(200, msgspec.json.encode(found))


async def get_model(service: GatewayContext, http: Exchange) -> None:
    """Answer one model. Raises UnknownModel for one that is not in the client's list."""
    name = http.scope["path_params"]["name"]
    models: dict[str, Any] = {model["id"]: model for model in _models(service)}
    if anthropic.is_asked(http.scope):
        known = {one: anthropic.model_info(model) for one, model in models.items()}
        models = {one: model for one, model in known.items() if model is not None}
    if name not in models:
        listed = ", ".join(models) or "none"
        message = f"model {name[:120]!r} does not exist here; available: {listed}"
        raise UnknownModel(message, param="model")
    await http.reply(200, msgspec.json.encode(models[name]))


def _models(service: GatewayContext) -> list[dict[str, Any]]:
    """List chat models with their adapters, then speech, transcription, embedding and image models.

    `kind` names the type. `status` is "ready"; "starting" for an expected model that cannot be used
    yet; "unloaded", "loading" or "failed" for one that is loaded on demand. Requests for these
    wait, except for a failed one.
    """
    found = []
    for role in KINDS:
        ready = _ready(service.bus.directory, role)
        found += [_described(role, card) for card in ready.values()]
        found += _starting(service, role, ready) + _offered(service.bus.directory, role, ready)
    return found


def _ready(directory: Directory, role: str) -> dict[str, ModelCard]:
    return servable(directory) if role == "decode" else served(directory, role)


def _described(role: str, card: ModelCard, status: str = "ready") -> dict[str, Any]:
    """Return a model with what it can do."""
    known = {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "motet",
        "status": status,
        "kind": "video" if card.videos else KINDS[role],
        "capabilities": capabilities(role, card),
    }
    if role == "decode":
        known |= {
            "context_length": card.context,
            "images": card.images,
            "audio": card.audio,
            "tools": card.tools,
            "reasoning": card.reasoning,
        }
        return known | ({"parent": card.parent} if card.parent else {})
    if role in ("embedding", "ranking"):
        return known | {"context_length": card.context}
    return known | ({"voices": card.voices} if role == "tts" else {})


def capabilities(role: str, card: ModelCard) -> list[str]:
    """Return what a model can do, in the words of Ollama where it has one."""
    if role != "decode":
        words = {
            "tts": ["speech", *(["voice-cloning"] if card.clones else [])],
            "asr": ["transcription", *(["realtime"] if card.live else [])],
            "embedding": [
                "embedding",
                *(["multi-vector"] if card.multi_vector else []),
                *(["vision"] if card.images else []),
            ],
            "ranking": ["rerank", "score"],
            "diffusion": ["video" if card.videos else "image"],
        }
        return words[role]
    able = {
        "completion": True,
        "chat": card.chat,
        "tools": card.tools,
        "vision": card.images,
        "thinking": card.reasoning,
        "insert": card.infill,
    }
    return [name for name, has in able.items() if has]


def _starting(
    service: GatewayContext, role: str, ready: dict[str, ModelCard]
) -> list[dict[str, Any]]:
    """List expected models that are not ready yet.

    Their creation time is unknown before they are loaded.
    """
    names = service.readiness.starting(role)
    return [_bare(role, name, "starting") for name in names if name not in ready]


def _offered(directory: Directory, role: str, ready: dict[str, ModelCard]) -> list[dict[str, Any]]:
    """List models that are loaded on demand and are not ready, with the state of their loading.

    Of a language model, its tokenizer knows most of what a loaded one would tell.
    """
    known = {c.name: c for beat in directory.ready("tokenizer") for c in beat.models}
    found = []
    for offer in directory.presence.offers(role):
        if offer.model in ready:
            continue
        card = known.get(offer.model) if role == "decode" else None
        model = (
            _bare(role, offer.model, _status(offer), videos=offer.videos)
            if card is None
            else _described(role, card, _status(offer))
        )
        found.append(model | {"loading": state_of(offer)})
    return found


def _status(offer: Offer) -> str:
    return _STATUS.get(offer.stage, "unloaded") if offer.stage != "ready" else "loading"


def _bare(role: str, name: str, status: str, *, videos: bool = False) -> dict[str, Any]:
    """Return a model of which only the name is known."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "motet",
        "status": status,
        "kind": "video" if videos else KINDS[role],
    }
