"""Measure the time from `motet up` to the first chat token, and to start another decode worker.

`python benchmarks/run.py starts --help`. Each round is a `motet up` with the bundled models and all
services, one question that is repeated until the chat model answers it, as clients do, then the
stack's readiness, a pause after which the memory of its processes is read, and `motet scale
decode=2`. Stages are those that each process logs when it is ready. The numbers go to
`results/starts.json`.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

import httpx

from benchmarks.stack.memory import ProcessMemory, total
from benchmarks.stack.up import STAGES, TIMEOUT, Up, motet_up
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER

RESULTS = RESULTS_FOLDER / "starts.json"
MODEL = "pocket-chat"
QUESTION = "There are two red circles and a blue square. How many circles are there?"
CHAT_LIMIT, WORKER_LIMIT = 10.0, 3.0  # seconds
MEMORY_LIMIT = 1.2e9  # bytes of the idle stack with all services
_PAUSE = 0.05  # seconds between questions that were not answered
_RETRIES = int(TIMEOUT / _PAUSE)
_CHAT_ALONE = ("--asr", "none", "--tts", "none", "--vad", "0")


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


# ------------------------------------------------------------------------------------------------------------ measuring
async def measure(plan: Plan) -> list[Run]:
    runs = []
    for number in range(plan.rounds):
        print(f"  round {number + 1} ...", flush=True)
        flags = _CHAT_ALONE if plan.chat_only else ()
        async with motet_up("--llm", MODEL, *flags) as up:
            runs.append(await _run(up, plan.idle))
    return runs


async def _run(up: Up, idle: float) -> Run:
    run = Run()
    await up.until({"gateway": 1})
    await _first_token(up.url)
    run.first_token = monotonic() - up.began
    await up.until_ready()
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
            table(["seconds of", "all", *STAGES], lines),
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
    known = [[stages[name] for stages in ready if name in stages] for name in STAGES]
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
