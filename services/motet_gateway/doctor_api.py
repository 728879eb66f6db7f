"""GET /metrics/doctor: what is short in the stack, and what to turn, for who may read /metrics."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query

from motet_shared.doctor import Window, diagnose

from .looks import LONGEST
from .service import Service

Seconds = Annotated[float, Query(gt=0, le=LONGEST)]


def doctor_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics/doctor")
    async def doctor(window: Seconds = 10.0) -> dict[str, Any]:
        """What the last `window` seconds of all heartbeats, and of this gateway's replies, say is short.

        `window_seconds`: what there was to look back on. `findings`: those that hold up most first; none is healthy.
        """
        recent, looks = service.metrics.recent, service.looks
        seen = Window.of(looks.last(window), [reply.timing for reply in recent.since(recent.clock() - window)])
        return {
            "time": recent.clock(),
            "window_seconds": round(looks.seconds(window), 3),
            "findings": msgspec.to_builtins(diagnose(seen)),
        }

    return router
