"""GET /metrics/stack and /metrics/replies: what `motet top` and `motet trace` show, for who may read /metrics."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query

from motet_shared.discovery import Directory

from .service import Service

MOST_REPLIES = 200

Seconds = Annotated[float, Query(gt=0, le=3600)]


def stack_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics/stack")
    async def stack(window: Seconds = 60.0, first: Seconds = 1.0, between: Seconds = 0.1) -> dict[str, Any]:
        """Every instance as its last heartbeat tells it, and the replies of this gateway in the last `window` seconds.

        `first`, `between`: most seconds to the first token and from one to the next of a reply that counts as good.
        """
        recent = service.metrics.recent
        return {
            "time": recent.clock(),
            "instances": instances(service.bus.directory),
            "replies": {"active": service.limits.active, **recent.summary(window, first, between)},
        }

    @router.get("/metrics/replies")
    async def replies(
        count: Annotated[int, Query(ge=1, le=MOST_REPLIES)] = 20, request: str = ""
    ) -> dict[str, list[dict[str, Any]]]:
        """The last replies of this gateway, the newest first: sizes, and seconds by stage. Never what was said."""
        return {"replies": [reply.document() for reply in service.metrics.recent.last(count, request)]}

    return router


def instances(directory: Directory) -> list[dict[str, Any]]:
    """Role, instance, state, host, pid, names of models, and load of each, by role and name."""
    found = [
        {
            "role": beat.role,
            "instance": beat.instance,
            "state": beat.state,
            "host": beat.host,
            "pid": beat.pid,
            "models": [card.name for card in beat.models],
            "load": msgspec.to_builtins(beat.load),
        }
        for beat in directory.everyone()
    ]
    return sorted(found, key=lambda one: (one["role"], one["instance"]))
