"""Connect a command to the bus of a running stack, as the NATS user `operator`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from motet_cli.supervision.connection import NatsAccess
from motet_shared.process.config import ProcessConfig, load
from motet_shared.wire.bus import Bus

_TAKEN = ("MOTET_PEER_CA", "MOTET_PEER_CERT", "MOTET_PEER_KEY")


def operator_config(access: NatsAccess) -> ProcessConfig:
    """Return the settings of a command: the given access, and the environment's certificates.

    Raises ConfigError.
    """
    files = {name: os.environ[name] for name in _TAKEN if name in os.environ}
    given = load(ProcessConfig, [], files)
    return replace(
        given, nats_url=access.nats_url, nats_password=access.nats_password, metrics_port=-1
    )


@asynccontextmanager
async def operator_bus(access: NatsAccess) -> AsyncIterator[Bus]:
    """Yield a bus of the user `operator`. Raises ConfigError if NATS cannot be reached."""
    config = operator_config(access)
    bus = await Bus.connect(config.instance_id("operator"), config)
    try:
        yield bus
    finally:
        await bus.close()
