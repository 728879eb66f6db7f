"""Strike instances of services, and wait until they rest."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable

from motet_shared.messages import Heartbeat
from motet_shared.wire.discovery import Directory


async def send_away(directory: Directory, struck: Heartbeat, seconds: float = 20.0) -> None:
    """Have an instance hand over what it has, as a restart does: SIGTERM, and again."""
    os.kill(struck.pid, signal.SIGTERM)
    await directory.wait_for(
        lambda found: all(beat.instance != struck.instance for beat in found.ready(struck.role)),
        seconds,
    )
    os.kill(struck.pid, signal.SIGTERM)


def kill(struck: Heartbeat) -> None:
    os.kill(struck.pid, signal.SIGKILL)


async def idle(directory: Directory, instances: Iterable[str] | None = None) -> None:
    """Wait until the next heartbeats of these instances, by default of all, say that they do nothing."""
    wanted = None if instances is None else set(instances)

    def beats() -> list[Heartbeat]:
        return [beat for beat in directory.everyone() if wanted is None or beat.instance in wanted]

    seen = {beat.instance: beat.seq for beat in beats()}
    async with asyncio.timeout(20):
        while any(  # noqa: ASYNC110  # heartbeats wake nobody
            beat.seq <= seen.get(beat.instance, 0) + 1
            or beat.load.get("active")
            or beat.load.get("running")
            for beat in beats()
        ):
            await asyncio.sleep(0.05)
