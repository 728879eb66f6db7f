"""Actuators that run a program of the place: `docker compose`, or `motet` beside a `motet up`."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Sequence

from motet_planner.actuators.actuator import ActuatorError
from motet_shared.errors import ConfigError

TIMEOUT = 120.0  # seconds: compose waits until containers that go have ended
LOCAL_TIMEOUT = 900.0  # `motet scale` gives replies ten minutes
_SHOWN = 400  # characters of what a program said


def parse_command(text: str, param: str) -> tuple[str, ...]:
    """`docker compose -f compose.yaml` as its words. ConfigError for what is no command."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{param}: {text!r} is no command: {error}", param=param) from None
    if not words:
        raise ConfigError(f"{param}: is empty; give a command such as 'docker compose'", param=param)
    return words


async def output_of(argv: Sequence[str], timeout: float = TIMEOUT) -> str:
    """What it prints on standard output. ActuatorError where it cannot be run, fails, or takes longer."""
    shown = shlex.join(argv)
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise ActuatorError(f"{shown}: cannot run it: {os.strerror(error.errno or 0)}") from None
    try:
        async with asyncio.timeout(timeout):
            out, err = await process.communicate()
    except TimeoutError:
        raise ActuatorError(f"{shown}: took longer than {timeout:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        said = (err or out).decode(errors="replace").strip()[-_SHOWN:]
        raise ActuatorError(f"{shown}: ended with {process.returncode}: {said}")
    return out.decode(errors="replace")


class Local:
    """Processes of a `motet up` on this machine, through `motet scale`: of each model, where a role has one."""

    def __init__(self, url: str, command: Sequence[str] = (sys.executable, "-m", "motet_cli")):
        self._url = url
        self._command = tuple(command)
        self._turn = asyncio.Lock()  # it carries out one order at a time

    async def count(self, name: str) -> int | None:
        """Heartbeats tell of all that it has started."""
        return None

    async def scale(self, name: str, count: int) -> None:
        """Until new processes are ready, and those that go have finished their work."""
        async with self._turn:
            await output_of([*self._command, "scale", f"{name}={count}", "--url", self._url], LOCAL_TIMEOUT)

    async def close(self) -> None:
        """Nothing is open."""


class Compose:
    """Services of a compose file. `command`: docker compose, with the options that name file and project."""

    def __init__(self, command: Sequence[str] = ("docker", "compose")):
        self._command = tuple(command)

    async def count(self, name: str) -> int | None:
        """Containers of the service that run or are being started."""
        return len((await output_of([*self._command, "ps", "--quiet", name])).split())

    async def scale(self, name: str, count: int) -> None:
        """Containers that are there stay as they are, and so do all other services."""
        options = ["--detach", "--no-deps", "--no-recreate", "--no-build", "--scale", f"{name}={count}"]
        await output_of([*self._command, "up", *options, name])

    async def close(self) -> None:
        """Nothing is open."""
