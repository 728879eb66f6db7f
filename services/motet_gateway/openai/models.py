"""Serve GET /v1/models, GET /v1/models/{id} and GET /v1/audio/voices.

The lists contain models that are ready, and expected ones that are still starting.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path

from motet_gateway.context import GatewayContext, Service
from motet_gateway.operations.readiness import KINDS
from motet_pipelines.chat.models import servable
from motet_pipelines.instances import served
from motet_shared.errors import UnknownModel
from motet_shared.messages import ModelCard


async def list_models(service: Service) -> dict[str, Any]:
    return {"object": "list", "data": _models(service)}


async def get_model(service: Service, name: Annotated[str, Path(min_length=1)]) -> dict[str, Any]:
    models = {model["id"]: model for model in _models(service)}
    if name not in models:
        known = ", ".join(models) or "none"
        raise UnknownModel(f"model {name!r} does not exist here; available: {known}", param="model")
    return models[name]


async def list_voices(service: Service) -> dict[str, Any]:
    """List the voices of all speech models; an extension, since OpenAI has no such route."""
    cards = served(service.bus.directory, "tts").values()
    voices = [
        {"id": voice, "object": "audio.voice", "model": card.name}
        for card in cards
        for voice in card.voices
    ]
    return {"object": "list", "data": voices}


def _models(service: GatewayContext) -> list[dict[str, Any]]:
    """List chat models with their adapters, then speech, transcription, embedding and image models.

    `kind` names the type. `status` is "ready", or "starting" for an expected model that cannot be
    used yet; requests for it wait.
    """
    directory = service.bus.directory
    found = {role: _starting(service, role) for role in KINDS}
    chat = [
        _as_dict(card)
        | {
            "kind": "chat",
            "context_length": card.context,
            "images": card.images,
            "tools": card.tools,
            "reasoning": card.reasoning,
        }
        | ({"parent": card.parent} if card.parent else {})
        for card in servable(directory).values()
    ]
    speech = [
        _as_dict(card) | {"kind": "speech", "voices": card.voices}
        for card in served(directory, "tts").values()
    ]
    listening = [
        _as_dict(card) | {"kind": "transcription"} for card in served(directory, "asr").values()
    ]
    embedding = [
        _as_dict(card) | {"kind": "embedding", "context_length": card.context}
        for card in served(directory, "embedding").values()
    ]
    drawing = [
        _as_dict(card) | {"kind": "image"} for card in served(directory, "diffusion").values()
    ]
    ready = {
        "decode": chat,
        "tts": speech,
        "asr": listening,
        "embedding": embedding,
        "diffusion": drawing,
    }
    return [model for role in KINDS for model in ready[role] + found[role]]


def _starting(service: GatewayContext, role: str) -> list[dict[str, Any]]:
    """List expected models that are not ready yet.

    Their creation time is unknown before they are loaded.
    """
    names = service.readiness.starting(role)
    return [
        _as_dict(ModelCard(name=name, context=0), "starting") | {"kind": KINDS[role]}
        for name in names
    ]


def _as_dict(card: ModelCard, status: str = "ready") -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "motet",
        "status": status,
    }
