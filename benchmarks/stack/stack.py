"""Run a stack of real processes around the fake engine: NATS, tokenizer and gateway on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import msgspec

from benchmarks.stack.fake_engine import save_checkpoint
from benchmarks.stack.load_generator import Load, Report
from benchmarks.support.paths import ROOT
from motet_shared.testing import NatsServer, free_port
from motet_shared.wire.discovery import HEARTBEAT_EVERY

START_SECONDS = 90.0
STOP_SECONDS = 10.0


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of child processes, with the project's packages on their path."""
    packages = [
        ROOT,
        *(ROOT / part for part in ("shared", "services", "kernels", "pipelines", "cli")),
    ]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, packages)), **extra}


def module_command(
    module: str, instance: str, *args: str, runner: Sequence[str] = ("-m",)
) -> list[str]:
    """Return the command that runs a module of Motet as an instance.

    runner: Python's arguments before the module.
    """
    return [sys.executable, *runner, module, "--instance", instance, "--stop-with-parent", *args]


class Stack:
    """Manage the processes of a stack.

    port: port of the gateway. pids: ids of the processes by name. env: environment of the
    processes.
    """

    def __init__(self, folder: Path, port: int, env: dict[str, str]):
        self.folder = folder
        self.port = port
        self.env = env
        self.pids: dict[str, int] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def spawn(self, name: str, argv: list[str]) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *argv, env=self.env, stdout=log, stderr=log
            )
        self._processes[name] = process
        self.pids[name] = process.pid

    async def start(self, module: str, instance: str, *args: str) -> None:
        """Start a module of Motet as an instance, known here by its id."""
        await self.spawn(instance, module_command(module, instance, *args))

    async def kill(self, name: str) -> float:
        """Kill a process with SIGKILL; return the moment, in seconds of `time.monotonic()`."""
        process = self._processes.pop(name)
        del self.pids[name]
        process.kill()
        killed = monotonic()
        await process.wait()
        return killed

    async def serve(self, services: dict[str, tuple[str, list[str]]]) -> None:
        """Start services, (role, arguments) by module, and wait until the gateway reports ready."""
        for module, (role, args) in services.items():
            await self.spawn(role, module_command(module, f"{role}-bench", *args))
        await self.until_ready("/health/ready")

    async def until_ready(
        self, path: str, word: str = "", *, port: int = 0, seconds: float = START_SECONDS
    ) -> None:
        """Wait until the HTTP server answers 200 with `word` in its text.

        port: of a server other than the gateway. Raises RuntimeError with the logs if a process ends or the time is up.
        """
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port or self.port}", timeout=2.0
        ) as http:
            for _ in range(int(seconds / 0.1)):
                if any(process.returncode is not None for process in self._processes.values()):
                    break
                with contextlib.suppress(httpx.HTTPError):
                    answer = await http.get(path)
                    if answer.status_code == 200 and word in answer.text:
                        return
                await asyncio.sleep(0.1)
        logs = "".join(
            f"--- {log.name}\n{log.read_text()[-2000:]}\n" for log in self.folder.glob("*.log")
        )
        raise RuntimeError(f"the benchmark's stack did not start\n{logs}")

    async def until_workers(self, names: set[str]) -> None:
        """Wait until exactly these decode instances are ready. Raises TimeoutError."""
        async with asyncio.timeout(START_SECONDS), httpx.AsyncClient(trust_env=False) as http:
            while True:
                told = (await http.get(f"http://127.0.0.1:{self.port}/metrics/stack")).json()[
                    "instances"
                ]
                if {
                    one["instance"]
                    for one in told
                    if one["role"] == "decode" and one["state"] == "ready"
                } == names:
                    await asyncio.sleep(
                        HEARTBEAT_EVERY
                    )  # until the tokenizer has their heartbeats too
                    return
                await asyncio.sleep(0.1)

    async def take_emitted(self, streams: int) -> dict[str, list[float]]:
        """Return emission times by request id, once `streams` streams have ended.

        Starts a new file of `FakeEngine`. Raises TimeoutError.
        """
        file = self.folder / "emitted"
        for _ in range(int(STOP_SECONDS / 0.05)):
            lines = _lines(file)
            if len(lines) >= streams:
                _remove(file)
                return {stream["request"]: stream["times"] for stream in map(json.loads, lines)}
            await asyncio.sleep(0.05)
        raise TimeoutError(
            f"{len(_lines(file))} of {streams} streams have ended after {STOP_SECONDS:g} s"
        )

    async def stop(self) -> None:
        processes = list(self._processes.values())
        for process in reversed(processes):
            if process.returncode is None:
                process.terminate()
        for process in processes:
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            except TimeoutError:
                process.kill()
                await process.wait()

    async def load(self, **settings: Any) -> Report:
        """Run the load generator as a process and return its report."""
        task = Load(port=self.port, pids=self.pids, **settings)
        argv = [
            sys.executable,
            "-m",
            "benchmarks.stack.load_generator",
            json.dumps(msgspec.to_builtins(task)),
        ]
        with tempfile.TemporaryFile() as out:
            process = await asyncio.create_subprocess_exec(*argv, env=environment(), stdout=out)
            try:
                await asyncio.wait_for(process.wait(), 120 + task.settle + task.seconds)
            finally:
                if process.returncode is None:
                    process.kill()
            if process.returncode != 0:
                raise RuntimeError(f"the load generator ended with {process.returncode}")
            out.seek(0)
            report = out.read()
        return msgspec.json.decode(report, type=Report)


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _remove(file: Path) -> None:
    file.unlink()


@contextlib.asynccontextmanager
async def nats_stack(*, store: bool = False, **env: str) -> AsyncIterator[tuple[Stack, NatsServer]]:
    """Yield a stack with a NATS server and no services.

    store: the server has JetStream. env: additional variables of the processes.
    """
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as name:
        async with NatsServer(store=Path(name) / "jetstream" if store else None) as nats:
            known = {
                "MOTET_NATS_URL": nats.url,
                "MOTET_NATS_CREDENTIALS": str(nats.credentials),
                "MOTET_LOG_LEVEL": "warning",
            }
            stack = Stack(Path(name), free_port(), environment(**known, **env))
            stack.pids["nats"] = nats.pid
            try:
                yield stack, nats
            finally:
                await stack.stop()


@contextlib.asynccontextmanager
async def motet_stack(
    *, rate: float = 0.0, batched: bool = True, gateway: Sequence[str] = (), keeps: bool = False
) -> AsyncIterator[Stack]:
    """Yield a ready stack around the fake engine.

    rate: engine steps per second; 0: as many as possible. batched: False sends each message alone
    (`one_by_one`). gateway: additional flags of the gateway. A paced engine appends the emission
    times of each stream to `folder/emitted` when the stream ends. keeps: connections are accepted
    and kept by a descriptor store.
    """
    async with nats_stack() as (stack, _):
        if keeps:
            path = stack.folder / "front.sock"
            command = ["-m", "motet_fdstore", "--path", str(path), "--port", str(stack.port)]
            await stack.spawn("fdstore", [sys.executable, *command])
            gateway = [*gateway, "--descriptor-store", str(path)]
        await _start(stack, rate, batched, gateway)
        yield stack


async def _start(stack: Stack, rate: float, batched: bool, gateway: Sequence[str]) -> None:
    checkpoint = save_checkpoint(stack.folder / "bench")
    engine = ["--rate", str(rate), *(["--emitted", str(stack.folder / "emitted")] if rate else [])]
    services = {
        "engine": ("benchmarks.stack.fake_engine", "decode", engine),
        "tokenizer": ("motet_tokenizer", "tokenizer", ["--model", str(checkpoint)]),
        # Clients disconnect after the measurement and never resume a reply.
        "gateway": (
            "motet_gateway",
            "gateway",
            ["--port", str(stack.port), "--session-keep", "0", *gateway],
        ),
    }
    runner = ["-m"] if batched else ["-m", "benchmarks.stack.one_by_one"]
    for name, (module, role, args) in services.items():
        await stack.spawn(name, module_command(module, f"{role}-bench", *args, runner=runner))
    await stack.until_ready("/health/ready")
