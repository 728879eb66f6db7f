"""GET /health/live, /health/ready and /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from motet_pipelines.models import missing, servable

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
        """200 when some model can be served, else 503 with what is missing; and what is missing for speech."""
        models = list(servable(service.bus.directory))
        lacking = [f"no {role} is ready" for role in missing(service.bus.directory)]
        if not models and not lacking:
            lacking.append("no model is served by both a tokenizer and a decode instance")
        if service.limits.draining:
            lacking.append("the gateway is stopping")
        speech = {"missing": Speech.here(service.bus.directory).missing}
        if not lacking:
            return JSONResponse({"status": "ready", "models": models, "speech": speech})
        body = {"status": "unavailable", "missing": lacking, "models": models, "speech": speech}
        return JSONResponse(body, 503, {"retry-after": str(RETRY_AFTER)})

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.registry.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
