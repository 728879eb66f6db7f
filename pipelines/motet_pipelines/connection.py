"""Connect a program of one's own to a stack, to run pipelines.

    async with connected() as bus:
        async with aclosing(chat(bus, request)) as batches:
            ...

`motet credentials environment` prints the variables with which it finds a `motet up` of the same
user; for a server of your own, set MOTET_NATS_URL and MOTET_NATS_CREDENTIALS.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from motet_shared.process.config import ProcessConfig, load
from motet_shared.wire.bus import Bus


@asynccontextmanager
async def connected(
    role: str = "gateway", config: ProcessConfig | None = None
) -> AsyncIterator[Bus]:
    """Yield a bus with an instance id of its own, which is closed after the context.

    role: the NATS user, which decides what may be called: `gateway` may call all that pipelines do.
    config: None for the settings of the environment, `MOTET_NATS_URL` and so on.
    Raises ConfigError for wrong settings, or if no NATS server answers.
    """
    settings = config or load(ProcessConfig, [])
    bus = await Bus.connect(settings.instance_id(role), settings)
    try:
        yield bus
    finally:
        await bus.close()
