"""A command on the wire of a running stack, as the operator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from motet_cli.connection import Connection
from motet_shared.bus import Bus
from motet_shared.config import ProcessConfig


@asynccontextmanager
async def operator_bus(found: Connection) -> AsyncIterator[Bus]:
    """Under the operator's user, for as long as the block lasts. ConfigError if there is no NATS server."""
    config = ProcessConfig(nats_url=found.nats_url, nats_password=found.nats_password, metrics_port=-1)
    bus = await Bus.connect(config.instance_id("operator"), config)
    try:
        yield bus
    finally:
        await bus.close()
