"""GET /metrics/stack and /metrics/replies: what `motet top` and `motet trace` show, for who may read /metrics."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query

from motet_shared.discovery import Directory
from motet_shared.messages import Heartbeat

from .service import Service

MOST_REPLIES = 200

# What an instance of a role has done since it began: the name in its load, and what one of it in a second is called.
_WORK = {
    "decode": ("tokens", "tokens/s"),
    "prefill": ("tokens", "tokens/s"),
    "asr": ("seconds", "× real time"),
    "tts": ("seconds", "× real time"),
    "diffusion": ("pictures", "pictures/s"),
    "embedding": ("tokens", "tokens/s"),
}

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
    """Role, instance, state, host, pid, names of models, load, and work done of each, by role and name."""
    found = [
        {
            "role": beat.role,
            "instance": beat.instance,
            "state": beat.state,
            "host": beat.host,
            "pid": beat.pid,
            "models": [card.name for card in beat.models],
            "load": msgspec.to_builtins(beat.load),
            "work": work(beat),
        }
        for beat in directory.everyone()
    ]
    return sorted(found, key=lambda one: (one["role"], one["instance"]))


def work(beat: Heartbeat) -> dict[str, Any] | None:
    """How much an instance has done since it began, and the unit of that per second; None where nothing is counted."""
    counted, unit = _WORK.get(beat.role, ("", ""))
    return {"done": beat.load[counted], "unit": unit} if counted in beat.load else None
