"""Run `motet up` as a process, as its users do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from time import monotonic
from typing import Any

import httpx

from benchmarks.stack.memory import ProcessMemory, memory_of
from benchmarks.stack.stack import STOP_SECONDS, environment
from motet_shared.testing import free_port

TIMEOUT = 400.0  # seconds; on a busy machine a start takes minutes
STAGES = ("interpreter", "imports", "connected", "weights", "packing", "warm-up", "registered")
_WARNING = re.compile(r'"level": ?"(warning|error|critical)"')
_PAUSE = 0.05  # seconds between looks at whether it is ready


class Up:
    """Run `motet up` and collect the ready messages of its processes."""

    def __init__(
        self, process: asyncio.subprocess.Process, port: int, began: float, env: dict[str, str]
    ):
        self.url = f"http://127.0.0.1:{port}"
        self.began = began
        self.ready: list[dict[str, Any]] = []
        self._process, self._env = process, env
        self._lines: list[str] = []
        self._updated = asyncio.Event()

    async def read(self) -> None:
        """Read every line that it prints, until it ends."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._lines.append(line.decode(errors="replace"))
            with contextlib.suppress(ValueError):
                ready = json.loads(line)
                if ready.get("message") == "ready" and "start" in ready:
                    self.ready.append(ready)
            self._updated.set()
        self._updated.set()

    async def until(self, roles: dict[str, int]) -> None:
        """Wait until this many instances of each role were ready. Raises RuntimeError with the log."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT):
                while any(len(self.of(role)) < count for role, count in roles.items()):
                    if self._process.returncode is not None:
                        break
                    self._updated.clear()
                    await self._updated.wait()
                else:
                    return
        raise RuntimeError("not ready:\n" + "".join(self._lines[-40:]))

    def of(self, role: str) -> list[dict[str, float]]:
        """Return the stages of the ready instances of a role, in order."""
        found = [ready for ready in self.ready if ready["role"] == role]
        return [{stage: ready[stage] for stage in STAGES if stage in ready} for ready in found]

    def warnings(self) -> list[str]:
        """Return the lines of its log that are warnings or errors."""
        return [line.rstrip() for line in self._lines if _WARNING.search(line)]

    async def names(self) -> dict[int, str]:
        """Return the roles of its instances by the ids of their processes."""
        async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT) as http:
            reply = (await http.get(f"{self.url}/metrics/stack")).raise_for_status()
        return {one["pid"]: one["role"] for one in reply.json()["instances"]}

    def processes(self, names: Mapping[int, str]) -> list[ProcessMemory]:
        """Return the memory of its processes, named after their roles."""
        return memory_of(self._process.pid, names)

    async def memory(self) -> list[ProcessMemory]:
        """Return the memory of its processes as they are now."""
        return await asyncio.to_thread(self.processes, await self.names())

    async def scale(self, *counts: str) -> None:
        """Run `motet scale`. Raises RuntimeError if it fails."""
        argv = [sys.executable, "-m", "motet_cli", "scale", "--url", self.url, *counts]
        process = await asyncio.create_subprocess_exec(
            *argv, env=self._env, stdout=asyncio.subprocess.DEVNULL
        )
        if await process.wait() != 0:
            raise RuntimeError(f"motet scale ended with {process.returncode}")

    async def until_ready(self) -> None:
        """Wait until the gateway says that it is ready. Raises RuntimeError after `TIMEOUT`."""
        async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT) as http:
            for _ in range(int(TIMEOUT / _PAUSE)):
                if (await http.get(f"{self.url}/health/ready")).status_code == httpx.codes.OK:
                    return
                await asyncio.sleep(_PAUSE)
        raise RuntimeError(f"the gateway was not ready within {TIMEOUT:g} s")


@contextlib.asynccontextmanager
async def motet_up(*flags: str, **variables: str) -> AsyncIterator[Up]:
    """Run `motet up` with these flags on a free port, and end it. Its chat model may not be ready yet.

    variables: of its environment, such as MOTET_KV_MEMORY.
    """
    port = free_port()
    env = environment(**variables)
    argv = [
        sys.executable,
        "-m",
        "motet_cli",
        "up",
        "--port",
        str(port),
        "--log-format",
        "json",
        *flags,
    ]
    began = monotonic()
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=env,
            cwd=folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        up = Up(process, port, began, env)
        reading = asyncio.create_task(up.read())
        try:
            yield up
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 4 * STOP_SECONDS)
            if process.returncode is None:
                process.kill()
            await reading
