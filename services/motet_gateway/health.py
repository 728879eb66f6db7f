"""GET /health/live, /health/ready and /metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from motet_pipelines.models import missing, servable, without_eyes

from .problems import RETRY_AFTER
from .realtime.audio_settings import Speech
from .service import Service


def health_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health/live")
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @router.get("/health/ready")
    async def ready() -> JSONResponse:
        """200 when some model can be served, else 503 with what is missing; and what is missing for speech and images.

        `images.models`: those that see, but cannot be shown anything now.
        """
        models = list(servable(service.bus.directory))
        lacking = [f"no {role} is ready" for role in missing(service.bus.directory)]
        if not models and not lacking:
            lacking.append("no model is served by both a tokenizer and a decode instance")
        if service.limits.draining:
            lacking.append("the gateway is stopping")
        blind = without_eyes(service.bus.directory)
        body: dict[str, Any] = {
            "models": models,
            "speech": {"missing": Speech.here(service.bus.directory).missing},
            "images": {"missing": ["vision"] if blind else [], "models": blind},
        }
        if not lacking:
            return JSONResponse({"status": "ready", **body})
        return JSONResponse(
            {"status": "unavailable", "missing": lacking, **body}, 503, {"retry-after": str(RETRY_AFTER)}
        )

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.registry.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
