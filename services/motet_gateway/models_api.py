"""GET /v1/models and GET /v1/models/{id}: what can answer now."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from motet_pipelines.models import servable
from motet_shared.errors import UnknownModel
from motet_shared.messages import ModelCard

from .service import Service


def models_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        cards = servable(service.bus.directory).values()
        return {"object": "list", "data": [_shape(card) for card in cards]}

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        cards = servable(service.bus.directory)
        if name not in cards:
            known = ", ".join(cards) or "none"
            raise UnknownModel(f"model {name!r} cannot be served here; there are: {known}", param="model")
        return _shape(cards[name])

    return router


def _shape(card: ModelCard) -> dict[str, Any]:
    head = {"id": card.name, "object": "model", "created": card.created, "owned_by": "motet"}
    return {**head, "context_length": card.context}
