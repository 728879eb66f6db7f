"""GET /v1/models and GET /v1/models/{id}: what can answer now."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from motet_pipelines.instances import served
from motet_pipelines.models import servable
from motet_shared.errors import UnknownModel
from motet_shared.messages import ModelCard

from .service import Service


def models_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": _models(service)}

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        models = {model["id"]: model for model in _models(service)}
        if name not in models:
            known = ", ".join(models) or "none"
            raise UnknownModel(f"model {name!r} cannot be served here; there are: {known}", param="model")
        return models[name]

    @router.get("/v1/audio/voices")
    async def list_voices() -> dict[str, Any]:
        """Not OpenAI's, which has its voices in its documentation."""
        cards = served(service.bus.directory, "tts").values()
        voices = [{"id": voice, "object": "audio.voice", "model": card.name} for card in cards for voice in card.voices]
        return {"object": "list", "data": voices}

    return router


def _models(service: Service) -> list[dict[str, Any]]:
    """Those that chat, their adapters, then those that speak, listen, embed and draw. `kind` tells them apart."""
    directory = service.bus.directory
    chat = [
        _shape(card)
        | {"kind": "chat", "context_length": card.context, "images": card.images, "tools": card.tools}
        | ({"parent": card.parent} if card.parent else {})
        for card in servable(directory).values()
    ]
    speech = [_shape(card) | {"kind": "speech", "voices": card.voices} for card in served(directory, "tts").values()]
    listening = [_shape(card) | {"kind": "transcription"} for card in served(directory, "asr").values()]
    embedding = [
        _shape(card) | {"kind": "embedding", "context_length": card.context}
        for card in served(directory, "embedding").values()
    ]
    drawing = [_shape(card) | {"kind": "image"} for card in served(directory, "diffusion").values()]
    return chat + speech + listening + embedding + drawing


def _shape(card: ModelCard) -> dict[str, Any]:
    return {"id": card.name, "object": "model", "created": card.created, "owned_by": "motet"}
