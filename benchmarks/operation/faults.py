"""Measure how long streams pause when their decode worker is killed with SIGKILL.

`python benchmarks/run.py faults --help`. NATS, tokenizer, gateway and two decode workers with
pocket-chat run as processes; clients stream from the gateway. A killed worker is replaced before
the next kill. The numbers go to `results/faults.json`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any

import httpx

from benchmarks.stack.stack import Stack, nats_stack
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER, ROOT
from motet_shared.quantiles import quantile
from motet_shared.testing import free_port

RESULTS = RESULTS_FOLDER / "faults.json"
WORKERS = 2
LIMIT_P50, LIMIT_P99 = 0.5, 1.5  # seconds
IN_FLIGHT = 0.2  # seconds in which chunks sent before a kill arrive
STREAM_SECONDS = 60.0  # that a stream may take altogether
_FAILOVERS = re.compile(r"^motet_failovers\S* (\S+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define how much is measured; lengths are in tokens."""

    model: str = str(ROOT / "models" / "pocket-chat")
    threads: int = 1  # of each decode worker
    kills: int = 25
    streams: int = 8
    output: int = 700
    began: int = 20  # least tokens of every stream before a worker is killed
    spread: float = 0.3  # most additional seconds, at random, before the kill
    seed: int = 0


QUICK = Plan(kills=1, streams=2, output=120, began=5, spread=0.0)


@dataclass
class Kill:
    """Hold the results of one kill.

    pauses: seconds from the kill to the next token of each stream that failed over.
    """

    pauses: list[float] = field(default_factory=list)
    failovers: int = 0
    failed: int = 0


class Client:
    """Stream one completion and record the time of each chunk.

    begun: set after `began` chunks.
    """

    def __init__(self, began: int) -> None:
        self.times: list[float] = []
        self.begun = asyncio.Event()
        self.finish = ""
        self._began = began

    async def run(self, http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        async with http.stream("POST", "/v1/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    self.times.append(monotonic())
                    if len(self.times) >= self._began:
                        self.begun.set()
                    if '"finish_reason":"' in line.replace(" ", ""):
                        self.finish = "length"

    def pause_after(self, moment: float) -> float:
        """Return the seconds from `moment` to the end of the longest gap that begins soon after it.

        Chunks sent before the kill still arrive shortly after it; later gaps have other causes.
        """
        gaps = [(after - before, after) for before, after in pairwise(self.times) if after > moment]
        found = [(gap, after) for gap, after in gaps if after - gap <= moment + IN_FLIGHT]
        return max(found)[1] - moment if found else 0.0


# ------------------------------------------------------------------------------------------------------------ measuring
async def measure(plan: Plan) -> list[Kill]:
    chance = random.Random(plan.seed)
    kills = []
    async with _stack(plan) as stack, _http(stack.port) as http:
        for number in range(plan.kills):
            victim = f"decode-{number}"
            kills.append(await _kill(stack, http, plan, victim, chance.uniform(0, plan.spread)))
            await _worker(stack, plan, number + WORKERS)
            await stack.until_workers(
                {f"decode-{n}" for n in range(number + 1, number + 1 + WORKERS)}
            )
            print(
                f"  kill {number + 1} of {plan.kills}: {kills[-1].failovers} streams failed over",
                flush=True,
            )
    return kills


async def _kill(
    stack: Stack, http: httpx.AsyncClient, plan: Plan, victim: str, wait: float
) -> Kill:
    """Run streams, kill one worker meanwhile, and return the pauses."""
    clients = [Client(plan.began) for _ in range(plan.streams)]
    before = await _failovers(stack.folder)
    async with asyncio.timeout(STREAM_SECONDS), asyncio.TaskGroup() as group:
        for number, client in enumerate(clients):
            group.create_task(client.run(http, _body(plan, f"{victim} {number}")))
        for client in clients:
            await client.begun.wait()
        await asyncio.sleep(wait)
        killed = await stack.kill(victim)
    failovers = round(await _failovers(stack.folder) - before)
    # Streams of the other worker continue: those that failed over have the longest pauses.
    pauses = sorted((client.pause_after(killed) for client in clients), reverse=True)[:failovers]
    return Kill(pauses, failovers, sum(client.finish != "length" for client in clients))


def _body(plan: Plan, prompt: str) -> dict[str, Any]:
    model = Path(plan.model).name
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": plan.output,
        "ignore_eos": True,
        "stream": True,
    }


async def _failovers(folder: Path) -> float:
    """Return the number of failovers so far, from the tokenizer's metrics."""
    port = int((folder / "tokenizer.port").read_text())
    async with _http(port) as http:
        [count] = _FAILOVERS.findall((await http.get("/metrics")).text)
    return float(count)


# ------------------------------------------------------------------------------------------------------------ the stack
@contextlib.asynccontextmanager
async def _stack(plan: Plan) -> AsyncIterator[Stack]:
    async with nats_stack(OMP_NUM_THREADS=str(plan.threads)) as (stack, _):
        metrics = free_port()
        (stack.folder / "tokenizer.port").write_text(str(metrics))
        for number in range(WORKERS):
            await _worker(stack, plan, number)
        services = {
            "motet_tokenizer": (
                "tokenizer",
                ["--model", plan.model, "--metrics-port", str(metrics)],
            ),
            "motet_gateway": ("gateway", ["--port", str(stack.port)]),
        }
        await stack.serve(services)
        await stack.until_workers({f"decode-{number}" for number in range(WORKERS)})
        yield stack


async def _worker(stack: Stack, plan: Plan, number: int) -> None:
    await stack.start(
        "motet_llm", f"decode-{number}", "--model", plan.model, "--threads", str(plan.threads)
    )


def _http(port: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", timeout=STREAM_SECONDS, trust_env=False
    )


# -------------------------------------------------------------------------------------------------------------- telling
def pauses_of(kills: Sequence[Kill]) -> list[float]:
    return [pause for kill in kills for pause in kill.pauses]


def targets(kills: Sequence[Kill]) -> list[Target]:
    pauses = pauses_of(kills)
    if not pauses:
        return []
    return [
        Target("pause after a kill, p50", quantile(pauses, 0.5) * 1e3, LIMIT_P50 * 1e3, "ms"),
        Target("pause after a kill, p99", quantile(pauses, 0.99) * 1e3, LIMIT_P99 * 1e3, "ms"),
        Target("streams that failed", sum(kill.failed for kill in kills), 0, "streams"),
    ]


def report(kills: Sequence[Kill]) -> str:
    pauses = pauses_of(kills)
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "longest": 1.0}
    cells = [
        f"{quantile(pauses, share) * 1e3:,.0f}" if pauses else "-" for share in shares.values()
    ]
    header = [
        "of decode",
        "kills",
        "streams failed over",
        "failed",
        *(f"{name}, ms" for name in shares),
    ]
    failed = sum(kill.failed for kill in kills)
    row = ["kill -9", str(len(kills)), str(len(pauses)), str(failed), *cells]
    return "\n\n".join([table(header, [row]), targets_table(targets(kills))])


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, "one kill", RESULTS)
    parser.add_argument("--kills", type=int, help="workers to kill (default: 25)")
    parser.add_argument("--streams", type=int, help="concurrent streams (default: 8)")
    parser.add_argument("--seed", type=int, help="seed of the times of the kills (default: 0)")
    args = parser.parse_args(argv)
    plan, before = planned(args, Plan(), QUICK), conditions()
    kills = asyncio.run(measure(plan))
    print(f"{load_line(before)}\n\n{report(kills)}", flush=True)
    write(args.file, before, plan, {"kills": kills}, targets(kills))


if __name__ == "__main__":
    main()
