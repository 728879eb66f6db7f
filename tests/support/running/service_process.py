"""Run a service as a process on a test's nats-server, with one compute thread."""

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
    """Run `python -m MODULE ARGV`, which ends with this process at the latest."""
    env = python_environment() | settings(nats)
    return await asyncio.create_subprocess_exec(sys.executable, "-m", module, *argv, env=env)


def python_environment() -> dict[str, str]:
    """Return an environment in which a process finds this one's modules."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


class Reachable(Protocol):
    """Describe a nats-server or a proxy of one."""

    credentials: Path

    @property
    def url(self) -> str: ...


def settings(nats: Reachable) -> dict[str, str]:
    """Return the settings with which a service finds this server and logs little."""
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
    """Terminate a process, by SIGKILL if necessary; a dead one is ignored."""
    if process.returncode is None:
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), 30)
    except TimeoutError:
        process.kill()
        await process.wait()
