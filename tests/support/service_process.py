"""A service as a process of its own on a test's nats-server, with one thread that computes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from motet_shared.testing import NatsServer

Process = asyncio.subprocess.Process


async def start(nats: NatsServer, module: str, *argv: str) -> Process:
    """`python -m MODULE ARGV`, which ends with this process at the latest."""
    env = python_environment() | settings(nats)
    return await asyncio.create_subprocess_exec(sys.executable, "-m", module, *argv, env=env)


def python_environment() -> dict[str, str]:
    """In which a process finds the modules that this one finds."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


class Reachable(Protocol):
    """A nats-server, or a way to one."""

    credentials: Path

    @property
    def url(self) -> str: ...


def settings(nats: Reachable) -> dict[str, str]:
    """With which a service finds this server, and says little."""
    return {
        "MOTET_NATS_URL": nats.url,
        "MOTET_NATS_CREDENTIALS": str(nats.credentials),
        "MOTET_METRICS_PORT": "-1",
        "MOTET_LOG_LEVEL": "warning",
        "MOTET_STOP_WITH_PARENT": "true",
    }


@asynccontextmanager
async def service_process(nats: NatsServer, module: str, *argv: str) -> AsyncIterator[Process]:
    process = await start(nats, module, *argv)
    try:
        yield process
    finally:
        await end(process)


async def end(process: Process) -> None:
    """As gently as it allows; nothing to do for one that is dead."""
    if process.returncode is None:
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), 30)
    except TimeoutError:
        process.kill()
        await process.wait()
