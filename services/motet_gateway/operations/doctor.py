"""Serve GET /metrics/doctor: bottlenecks of the stack and the settings that remedy them.

It needs access to /metrics.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import Query

from motet_doctor import ObservationWindow, diagnose
from motet_gateway.context import Service

from .heartbeat_history import LONGEST

Seconds = Annotated[float, Query(gt=0, le=LONGEST, description="Seconds back that are looked at.")]


async def doctor(service: Service, window: Seconds = 10.0) -> dict[str, Any]:
    """Report bottlenecks in the last `window` seconds of heartbeats and of own replies.

    `window_seconds`: the seconds that were available. `findings`: those with the largest effect
    first; an empty list means healthy.
    """
    recent, heartbeats = service.metrics.recent, service.heartbeats
    seen = ObservationWindow.of(
        heartbeats.last(window),
        [reply.timing for reply in recent.since(recent.clock() - window)],
    )
    return {
        "time": recent.clock(),
        "window_seconds": round(heartbeats.seconds(window), 3),
        "findings": msgspec.to_builtins(diagnose(seen)),
    }
