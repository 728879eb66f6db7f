"""Serve GET /metrics/stack and /metrics/replies, for `motet top` and `motet trace`.

They need access to /metrics.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import Query

from motet_gateway.context import Service
from motet_shared.messages import Heartbeat
from motet_shared.wire.discovery import Directory

MOST_REPLIES = 200

# Work since the start of an instance, by role: the field of its load, and the unit per second.
_WORK = {
    "decode": ("tokens", "tokens/s"),
    "prefill": ("tokens", "tokens/s"),
    "asr": ("seconds", "× real time"),
    "tts": ("seconds", "× real time"),
    "diffusion": ("pictures", "pictures/s"),
    "embedding": ("tokens", "tokens/s"),
    "ranking": ("tokens", "tokens/s"),
}


def _seconds(description: str) -> Any:
    return Query(gt=0, le=3600, description=description)


async def stack(
    service: Service,
    window: Annotated[float, _seconds("Seconds back that count.")] = 60.0,
    first: Annotated[float, _seconds("Most seconds to the first token.")] = 1.0,
    between: Annotated[float, _seconds("Most seconds between two tokens.")] = 0.1,
) -> dict[str, Any]:
    """Report all instances' last heartbeats, and this gateway's replies in the last `window` s.

    `first`, `between`: most seconds to the first token, and between two tokens, of a good
    reply.
    """
    recent = service.metrics.recent
    return {
        "time": recent.clock(),
        "instances": instances(service.bus.directory),
        "replies": {"active": service.limits.active, **recent.summary(window, first, between)},
    }


async def replies(
    service: Service, count: Annotated[int, Query(ge=1, le=MOST_REPLIES)] = 20, request: str = ""
) -> dict[str, list[dict[str, Any]]]:
    """Report the last replies of this gateway, the newest first: sizes, and seconds by stage.

    Texts are never included.
    """
    return {"replies": [reply.document() for reply in service.metrics.recent.last(count, request)]}


def instances(directory: Directory) -> list[dict[str, Any]]:
    """Return role, instance, state, host, site, pid, models, load and work of each, by role and name."""
    found = [
        {
            "role": beat.role,
            "instance": beat.instance,
            "state": beat.state,
            "host": beat.host,
            "site": beat.site,
            "pid": beat.pid,
            "models": [card.name for card in beat.models],
            "load": msgspec.to_builtins(beat.load),
            "work": work(beat),
        }
        for beat in directory.everyone()
    ]
    return sorted(found, key=lambda one: (one["role"], one["instance"]))


def work(beat: Heartbeat) -> dict[str, Any] | None:
    """Return the work an instance has done and its unit per second; None where none is counted."""
    counted, unit = _WORK.get(beat.role, ("", ""))
    return {"done": beat.load[counted], "unit": unit} if counted in beat.load else None
