"""Scale by running a program: `docker compose`, or `motet` beside a `motet up`."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Sequence

from motet_planner.actuators.actuator import ActuatorError
from motet_shared.errors import ConfigError

TIMEOUT = 120.0  # seconds; compose waits until removed containers have ended
LOCAL_TIMEOUT = 900.0  # seconds; `motet scale` gives replies ten minutes
_SHOWN = 400  # characters of a program's output in errors


def parse_command(text: str, param: str) -> tuple[str, ...]:
    """Return the words of a command such as `docker compose -f compose.yaml`.

    Raises ConfigError for what is no command.
    """
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{param}: {text!r} is no command: {error}", param=param) from None
    if not words:
        raise ConfigError(
            f"{param}: is empty; give a command such as 'docker compose'", param=param
        )
    return words


async def output_of(argv: Sequence[str], timeout: float = TIMEOUT) -> str:
    """Return the standard output of a program.

    Raises ActuatorError if it cannot be run, fails, or takes longer than `timeout` seconds.
    """
    shown = shlex.join(argv)
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
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
    """Scale processes of a `motet up` on this machine with `motet scale`, alike for each model."""

    def __init__(self, url: str, command: Sequence[str] = (sys.executable, "-m", "motet_cli")):
        self._url = url
        self._command = tuple(command)
        self._turn = asyncio.Lock()  # `motet up` handles one scale request at a time

    async def count(self, name: str) -> int | None:
        """Return None: heartbeats report all instances that were started."""
        return None

    async def scale(self, name: str, count: int) -> None:
        """Scale, and wait until new processes are ready and removed ones have finished."""
        async with self._turn:
            await output_of(
                [*self._command, "scale", f"{name}={count}", "--url", self._url], LOCAL_TIMEOUT
            )

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


class Compose:
    """Scale services of a compose file.

    `command`: docker compose, with options for file and project.
    """

    def __init__(self, command: Sequence[str] = ("docker", "compose")):
        self._command = tuple(command)

    async def count(self, name: str) -> int | None:
        """Return the containers of the service that run or are starting."""
        return len((await output_of([*self._command, "ps", "--quiet", name])).split())

    async def scale(self, name: str, count: int) -> None:
        """Scale one service; existing containers and all other services stay as they are."""
        options = [
            "--detach",
            "--no-deps",
            "--no-recreate",
            "--no-build",
            "--scale",
            f"{name}={count}",
        ]
        await output_of([*self._command, "up", *options, name])

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""
