"""A stack of real processes that can be made ill, a crowd of HTTP clients, and what `motet doctor` says of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from benchmarks.stack.load_generator import Load, post
from motet_shared.testing import NatsServer, free_port
from support.running.fork_server import ForkServer
from support.running.service_process import python_environment

STARTS_WITHIN = 120.0
FOUND_WITHIN = 100.0
END = b"\r\n0\r\n\r\n"  # of a body in chunks


class Clinic:
    """`async with Clinic(…) as clinic:`; what it has started ends with the block."""

    def __init__(self, nats: NatsServer, light: ForkServer, heavy: ForkServer, model: str):
        """`light` has loaded what stands before the engines, `heavy` the engines."""
        self.port = free_port()
        self.model = model
        self._nats, self._light, self._heavy = nats, light, heavy
        self._numbers = itertools.count()
        self._connections: list[socket.socket] = []

    async def __aenter__(self) -> Clinic:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._connections:
            self._connections.pop().close()
        await asyncio.gather(self._light.end_all(), self._heavy.end_all())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # --------------------------------------------------------------------------------------------------------- services
    async def front(self, folder: Path, *argv: str) -> None:
        """A gateway, and a tokenizer with these settings."""
        await self._light.start(
            self._nats, "motet_gateway", "--port", str(self.port), "--drain-timeout", "0.1"
        )
        await self._light.start(
            self._nats, "motet_tokenizer", "--model", f"{self.model}={folder}", *argv
        )

    async def decode(self, folder: Path, *argv: str) -> int:
        """A real engine."""
        own = ("--model", str(folder), "--name", self.model, "--threads", "1")
        return await self._heavy.start(self._nats, "motet_llm", *own, *argv)

    async def fake(self, *argv: str) -> int:
        """An engine without a model: `fake_engine`."""
        return await self._heavy.start(self._nats, "benchmarks.stack.fake_engine", *argv)

    async def ready(self, **roles: int) -> None:
        """Wait until so many instances of each role are ready, and a model can be asked."""
        give_up = time.monotonic() + STARTS_WITHIN
        async with httpx.AsyncClient(trust_env=False) as http:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    told = (await http.get(f"{self.url}/metrics/stack")).json()["instances"]
                    states = [one["role"] for one in told if one["state"] == "ready"]
                    served = (await http.get(f"{self.url}/health/ready")).status_code == 200
                    if served and all(states.count(role) >= count for role, count in roles.items()):
                        return
                if time.monotonic() > give_up:
                    raise TimeoutError(f"not ready within {STARTS_WITHIN:g} s: {roles}")
                await asyncio.sleep(0.1)

    # ------------------------------------------------------------------------------------------------------------ load
    def _post(self, prompt: str, max_tokens: int) -> bytes:
        load = Load(
            port=self.port,
            clients="sse",
            model=self.model,
            max_tokens=max_tokens,
            prompts=[prompt],
            ignore_eos=True,
            temperature=0.0,
        )
        return post(load, stream=True, request_id=f"clinic-{next(self._numbers)}")

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)

    async def ask(self, prompt: str, max_tokens: int = 1) -> None:
        """One reply, read to its end."""
        reader, writer = await self.connect()
        try:
            writer.write(self._post(prompt, max_tokens))
            head = await reader.readline()
            assert b" 200 " in head, head
            await reader.readuntil(END)
        finally:
            writer.close()

    async def stream(
        self, prompt: str, max_tokens: int, begun: asyncio.Event | None = None
    ) -> None:
        """One long reply, read as it comes."""
        reader, writer = await self.connect()
        try:
            writer.write(self._post(prompt, max_tokens))
            await reader.readuntil(b'"content":"')
            if begun is not None:
                begun.set()
            await reader.readuntil(END)
        finally:
            writer.close()

    def open_and_forget(self, prompt: str, max_tokens: int) -> None:
        """Ask, and never read the answer."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(self._post(prompt, max_tokens))
        self._connections.append(connection)

    @contextlib.asynccontextmanager
    async def crowd(self, *work: Any) -> AsyncIterator[None]:
        """Coroutines that run as long as the block does; one that fails is a failure of the test."""
        tasks = [asyncio.create_task(one) for one in work]
        try:
            yield
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def finds(self, name: str) -> dict[str, dict[str, Any]]:
        """What `motet doctor` finds when it finds `name`; on a busy machine that takes some windows."""
        give_up = time.monotonic() + FOUND_WITHIN
        found: dict[str, dict[str, Any]] = {}
        while name not in found and time.monotonic() < give_up:
            found = await self.diagnosis()
        if name not in found:
            async with httpx.AsyncClient(trust_env=False) as http:
                print((await http.get(f"{self.url}/metrics/stack")).text)
        return found

    async def diagnosis(self, seconds: float = 3.0) -> dict[str, dict[str, Any]]:
        """What `motet doctor` finds after so many seconds, by name, in its order."""
        await asyncio.sleep(seconds + 1.0)  # the load has begun to tell by then
        argv = (
            sys.executable,
            "-m",
            "motet_cli",
            "doctor",
            "--url",
            self.url,
            "--window",
            str(seconds),
            "--json",
        )
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=python_environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode in (0, 1), err.decode()
        told = json.loads(out)
        assert (process.returncode == 1) == bool(told["findings"])
        assert told["window_seconds"] > seconds / 2
        return {one["name"]: one for one in told["findings"]}


@contextlib.contextmanager
def busy_loop(core: int) -> Iterator[None]:
    """A process that computes on one core, for a minute at most."""
    code = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        os.sched_setaffinity(process.pid, {core})
        yield
    finally:
        process.kill()
        process.wait()


def pin(pid: int, core: int) -> None:
    """All threads of a process, and those that it will make."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), {core})
