"""Serve GET /health/live, /health/ready (also as /health), /version and /metrics."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Response
from fastapi.responses import JSONResponse

from motet_gateway.context import Service
from motet_gateway.http.problems import RETRY_AFTER
from motet_pipelines.chat.models import servable, without_encoder
from motet_pipelines.voice.services import SpeechServices
from motet_shared import __version__


async def live() -> dict[str, str]:
    return {"status": "live"}


async def ready(
    service: Service,
    model: Annotated[str, Query(description="Ask for this model alone.")] = "",
    speech_model: Annotated[str, Query(description="Tell of conversations with this model.")] = "",
) -> JSONResponse:
    """Answer 200 once all configured models have served and while any serves; else 503.

    A 503 lists what is missing. `?model=` asks for one model: 200 while it can be used, 404 for
    a name that is unknown. `models`: chat models. `speech.missing`: roles that a spoken
    conversation lacks, with `speech_model` or `model` if given; `speech.hears`: that one gets the
    user's sound itself.
    `images.models`: models that read images but cannot be given any now.
    """
    missing = service.readiness.missing(model)
    models = list(servable(service.bus.directory))
    blind = without_encoder(service.bus.directory)
    speech = SpeechServices.find(service.bus.directory, model=speech_model or model)
    body: dict[str, Any] = {
        "models": models,
        "speech": {"missing": speech.missing_to_talk, "hears": speech.hears},
        "images": {"missing": ["encoder"] if blind else [], "models": blind},
    }
    if not missing:
        return JSONResponse({"status": "ready", **body})
    return JSONResponse(
        {"status": "unavailable", "missing": missing, **body},
        503,
        {"retry-after": str(RETRY_AFTER)},
    )


async def version() -> dict[str, str]:
    return {"version": __version__}


async def metrics(service: Service) -> Response:
    return Response(
        service.metrics.registry.render(), media_type="text/plain; version=0.0.4; charset=utf-8"
    )
