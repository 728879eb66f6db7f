"""Measure the time from `motet up` to the first chat token, and to start another decode worker.

`python benchmarks/run.py starts --help`. Each round is a `motet up` with the bundled models and all
services, one question that is repeated until the chat model answers it, as clients do, then the
stack's readiness, a pause after which the memory of its processes is read, and `motet scale
decode=2`. Stages are those that each process logs when it is ready. The numbers go to
`results/starts.json`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import httpx

from benchmarks.operation.memory import ProcessMemory, memory_of, total
from benchmarks.stack.stack import STOP_SECONDS
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER, ROOT
from motet_shared.testing import free_port

RESULTS = RESULTS_FOLDER / "starts.json"
MODEL = "pocket-chat"
QUESTION = "There are two red circles and a blue square. How many circles are there?"
CHAT_LIMIT, WORKER_LIMIT = 10.0, 3.0  # seconds
MEMORY_LIMIT = 1.2e9  # bytes of the idle stack with all services
TIMEOUT = 400.0  # seconds; on a busy machine a start takes minutes
_PAUSE = 0.05  # seconds between questions that were not answered
_RETRIES = int(TIMEOUT / _PAUSE)
_STAGES = ("interpreter", "imports", "connected", "weights", "packing", "warm-up", "registered")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define how much is measured.

    chat_only: run only the services of chat. idle: seconds between readiness and the reading of the
    memory.
    """

    rounds: int = 5
    chat_only: bool = False
    idle: float = 20.0


QUICK = Plan(rounds=1, chat_only=True, idle=0.5)


@dataclass
class Run:
    """Hold one round: seconds until the first token, all ready, another worker; stages by role.

    memory: of the idle stack, by process.
    """

    ready: float = 0.0
    first_token: float = 0.0
    worker: float = 0.0
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    worker_stages: dict[str, float] = field(default_factory=dict)
    memory: list[ProcessMemory] = field(default_factory=list)


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
        return [{stage: ready[stage] for stage in _STAGES if stage in ready} for ready in found]

    async def memory(self) -> list[ProcessMemory]:
        """Return the memory of its processes, named after their roles."""
        async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT) as http:
            reply = (await http.get(f"{self.url}/metrics/stack")).raise_for_status()
        names = {one["pid"]: one["role"] for one in reply.json()["instances"]}
        return await asyncio.to_thread(memory_of, self._process.pid, names)

    async def scale(self, *counts: str) -> None:
        """Run `motet scale`. Raises RuntimeError if it fails."""
        argv = [sys.executable, "-m", "motet_cli", "scale", "--url", self.url, *counts]
        process = await asyncio.create_subprocess_exec(
            *argv, env=self._env, stdout=asyncio.subprocess.DEVNULL
        )
        if await process.wait() != 0:
            raise RuntimeError(f"motet scale ended with {process.returncode}")


@contextlib.asynccontextmanager
async def running(plan: Plan) -> AsyncIterator[Up]:
    port = free_port()
    packages = [ROOT / part for part in ("shared", "services", "kernels", "pipelines", "cli")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, packages))}
    argv = [
        sys.executable,
        "-m",
        "motet_cli",
        "up",
        "--llm",
        MODEL,
        "--port",
        str(port),
        "--log-format",
        "json",
    ]
    argv += ["--asr", "none", "--tts", "none", "--vad", "0"] if plan.chat_only else []
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


# ------------------------------------------------------------------------------------------------------------ measuring
async def measure(plan: Plan) -> list[Run]:
    runs = []
    for number in range(plan.rounds):
        print(f"  round {number + 1} ...", flush=True)
        async with running(plan) as up:
            runs.append(await _run(up, plan.idle))
    return runs


async def _run(up: Up, idle: float) -> Run:
    run = Run()
    await up.until({"gateway": 1})
    await _first_token(up.url)
    run.first_token = monotonic() - up.began
    await _until_ready(up.url)
    run.ready = monotonic() - up.began
    await up.until({"decode": 1})
    await asyncio.sleep(idle)
    run.memory = await up.memory()
    requested = monotonic()
    scaling = asyncio.create_task(up.scale("decode=2"))
    try:
        await up.until({"decode": 2})
        run.worker = monotonic() - requested
        await scaling
    finally:
        scaling.cancel()
    run.stages = {role: up.of(role)[0] for role in sorted({ready["role"] for ready in up.ready})}
    run.worker_stages = up.of("decode")[1]
    return run


async def _first_token(url: str) -> None:
    """Ask a question, again while its model is not served yet; return at the first token."""
    question = {"role": "user", "content": QUESTION}
    body = {"model": MODEL, "messages": [question], "temperature": 0, "stream": True}
    async with httpx.AsyncClient(timeout=TIMEOUT, trust_env=False) as http:
        for _ in range(_RETRIES):
            async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as reply:
                if reply.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                    reply.raise_for_status()
                    return await _read_token(reply)
            await asyncio.sleep(_PAUSE)
    raise RuntimeError(f"{MODEL} was not served within {TIMEOUT:g} s")


async def _read_token(reply: httpx.Response) -> None:
    async for line in reply.aiter_lines():
        if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get(
            "content"
        ):
            return
    raise RuntimeError("the reply had no token")


async def _until_ready(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT) as http:
        for _ in range(_RETRIES):
            if (await http.get(f"{url}/health/ready")).status_code == httpx.codes.OK:
                return
            await asyncio.sleep(_PAUSE)
    raise RuntimeError(f"the gateway was not ready within {TIMEOUT:g} s")


# -------------------------------------------------------------------------------------------------------------- telling
def targets(runs: Sequence[Run], plan: Plan) -> list[Target]:
    first, worker, memory = (
        statistics.median(values)
        for values in zip(*((r.first_token, r.worker, total(r.memory)) for r in runs), strict=True)
    )
    stack = "chat alone" if plan.chat_only else "default stack"
    return [
        Target("`motet up` to the first chat token", first, CHAT_LIMIT, "s"),
        Target("another decode worker, until ready", worker, WORKER_LIMIT, "s"),
        Target(f"idle {stack}, PSS", memory / 1e9, MEMORY_LIMIT / 1e9, "GB"),
    ]


def report(runs: Sequence[Run], plan: Plan) -> str:
    whole = [
        ["first chat token", *_spread([run.first_token for run in runs])],
        ["all services ready", *_spread([run.ready for run in runs])],
        ["another decode worker", *_spread([run.worker for run in runs])],
    ]
    roles = {
        role: [run.stages[role] for run in runs if role in run.stages] for role in runs[0].stages
    }
    roles["another decode"] = [run.worker_stages for run in runs]
    lines = [[role, *_stages(ready)] for role, ready in roles.items()]
    return "\n\n".join(
        [
            table(["seconds until", "median", "least", "most"], whole),
            table(["seconds of", "all", *_STAGES], lines),
            _memory_table(runs),
            targets_table(targets(runs, plan)),
        ]
    )


def _memory_table(runs: Sequence[Run]) -> str:
    """Return the memory of each process of the round whose total is the median."""
    processes = sorted(runs, key=lambda run: total(run.memory))[len(runs) // 2].memory
    rows = [
        [
            one.name,
            *(f"{size / 1e6:,.0f}" for size in (one.pss, one.anonymous, one.shared, one.files)),
        ]
        for one in [*processes, _sum(processes)]
    ]
    return table(["MB of", "PSS", "anonymous", "shared", "files"], rows)


def _sum(processes: Sequence[ProcessMemory]) -> ProcessMemory:
    sizes = ([one.pss, one.anonymous, one.shared, one.files] for one in processes)
    return ProcessMemory("all", *map(sum, zip(*sizes, strict=True)))


def _spread(values: Sequence[float]) -> list[str]:
    return [f"{value:.2f}" for value in (statistics.median(values), min(values), max(values))]


def _stages(ready: Sequence[dict[str, float]]) -> list[str]:
    """Return medians of the whole start and of each stage; empty for stages that a process lacks."""
    whole = statistics.median(sum(stages.values()) for stages in ready)
    known = [[stages[name] for stages in ready if name in stages] for name in _STAGES]
    return [
        f"{whole:.2f}",
        *(f"{statistics.median(values):.2f}" if values else "" for values in known),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, "one start of a chat alone", RESULTS)
    parser.add_argument("--rounds", type=int, help="starts to measure (default: 5)")
    parser.add_argument(
        "--chat-only", action="store_true", default=None, help="run only the services of chat"
    )
    args = parser.parse_args(argv)
    plan, before = planned(args, Plan(), QUICK), conditions()
    runs = asyncio.run(measure(plan))
    print(f"{load_line(before)}\n\n{report(runs, plan)}", flush=True)
    write(args.file, before, plan, {"runs": runs}, targets(runs, plan))


if __name__ == "__main__":
    main()
