"""Connect a command to the bus of a running stack, as its operator or in another role."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from motet_cli.supervision.connection import NatsAccess
from motet_pipelines.connection import connected
from motet_shared.process.config import ProcessConfig, load
from motet_shared.wire.bus import Bus

_TAKEN = (
    "MOTET_PEER_CA",
    "MOTET_PEER_CERT",
    "MOTET_PEER_KEY",
    "MOTET_BLOB_HOST",
    "MOTET_BLOB_NAME",
    "MOTET_SITE",
)


def bus_config(found: NatsAccess, role: str = "operator") -> ProcessConfig:
    """Return a command's settings: the connection, and certificates and addresses of the environment.

    Raises ConfigError.
    """
    variables = {name: os.environ[name] for name in _TAKEN if name in os.environ}
    variables |= found.peer_variables()
    given = load(ProcessConfig, [], variables)
    return replace(
        given, nats_url=found.nats_url, nats_password=found.password(role), metrics_port=-1
    )


@asynccontextmanager
async def stack_bus(found: NatsAccess, role: str = "operator") -> AsyncIterator[Bus]:
    """Yield a bus of the role's user. Raises ConfigError if there is no NATS server."""
    log = logging.getLogger("motet_shared.wire")
    before = log.level
    log.setLevel(logging.CRITICAL)  # a command raises instead
    try:
        async with connected(role, bus_config(found, role)) as bus:
            yield bus
    finally:
        log.setLevel(before)
