"""Measure requests per second and goodput with one to four decode workers.

`python benchmarks/run.py replicas --help`. NATS, tokenizer and gateway are real processes; the workers
are fake engines of a fixed speed, so that a small machine can run four: prompts wait for their
prefill, then every stream gets a token per step. The numbers go to `results/replicas.json`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import httpx

from benchmarks.stack.fake_engine import FIRST_ID, MODEL, WORDS, save_checkpoint
from benchmarks.stack.stack import Stack, nats_stack
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER
from motet_shared.quantiles import quantile

RESULTS = RESULTS_FOLDER / "replicas.json"
LEAST = 3.6  # times the requests per second of one worker, with four
REQUEST_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define how much is measured, in tokens and seconds.

    prefill: tokens per second of each worker. settle: seconds from the first request to the first
    that counts. clients: clients per worker, each with one request at a time. steps: engine steps
    per second. first, between: limits of a good request.
    """

    workers: tuple[int, ...] = (1, 2, 3, 4)
    rounds: int = 3
    seconds: float = 20.0
    settle: float = 4.0  # from the first request to the first that counts
    clients: int = 12  # per worker, each with one request at a time
    prompt: int = 400
    output: int = 32
    prefill: float = 2000.0
    steps: float = 40.0  # per second
    first: float = 3.0  # seconds to the first token of a good request
    between: float = 0.1  # mean seconds between its tokens


QUICK = Plan(workers=(1, 2), rounds=1, seconds=1.0, settle=0.5, clients=2, prompt=40, output=4)


@dataclass
class Run:
    """Hold one number of workers in one round.

    first: seconds to the first token of each request that ended in time.
    """

    workers: int
    round: int
    requests_per_second: float = 0.0
    good_per_second: float = 0.0
    first: list[float] = field(default_factory=list)
    failed: int = 0


@dataclass
class _Tally:
    """Count the requests that end from `since` on."""

    plan: Plan
    since: float
    first: list[float] = field(default_factory=list)
    good: int = 0
    failed: int = 0

    def record(self, requested: float, first: float, ended: float) -> None:
        if ended < self.since:
            return
        self.first.append(first - requested)
        between = (ended - first) / max(self.plan.output - 1, 1)
        self.good += first - requested <= self.plan.first and between <= self.plan.between


# ------------------------------------------------------------------------------------------------------------ measuring
async def measure(plan: Plan) -> list[Run]:
    """Run every number of workers in every round, in turn."""
    runs = []
    for number in range(plan.rounds):
        for workers in plan.workers:
            print(f"  round {number + 1}, {workers} workers ...", flush=True)
            async with _stack(plan, workers) as stack:
                runs.append(await _run(stack.port, plan, workers, number))
    return runs


async def _run(port: int, plan: Plan, workers: int, number: int) -> Run:
    begin = monotonic()
    tally = _Tally(plan, begin + plan.settle)
    end = tally.since + plan.seconds
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            timeout=REQUEST_SECONDS,
            limits=limits,
            trust_env=False,
        ) as http,
        asyncio.TaskGroup() as group,
    ):
        for client in range(plan.clients * workers):
            chance = random.Random(f"{number}/{client}")
            group.create_task(_client(http, plan, tally, chance, end))
    done = len(tally.first)
    return Run(
        workers, number, done / plan.seconds, tally.good / plan.seconds, tally.first, tally.failed
    )


async def _client(
    http: httpx.AsyncClient, plan: Plan, tally: _Tally, chance: random.Random, end: float
) -> None:
    """Send one request after another; those that have not ended at `end` do not count."""
    while monotonic() < end:
        prompt = [FIRST_ID + chance.randrange(WORDS) for _ in range(plan.prompt)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": plan.output, "stream": True}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(end - monotonic(), 0.0)):
                await _ask(http, body, tally)


async def _ask(http: httpx.AsyncClient, body: dict[str, Any], tally: _Tally) -> None:
    requested, first = monotonic(), 0.0
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        tally.failed += reply.status_code != 200
        async for line in reply.aiter_lines():
            if not first and line.startswith("data: {"):
                first = monotonic()
    if first:
        tally.record(requested, first, monotonic())


# ------------------------------------------------------------------------------------------------------------ the stack
@contextlib.asynccontextmanager
async def _stack(plan: Plan, workers: int) -> AsyncIterator[Stack]:
    async with nats_stack() as (stack, _):
        checkpoint = save_checkpoint(stack.folder / MODEL)
        engine = ["--rate", str(plan.steps), "--prefill", str(plan.prefill)]
        for number in range(workers):
            await stack.start("benchmarks.stack.fake_engine", f"decode-{number}", *engine)
        services = {
            "motet_tokenizer": ("tokenizer", ["--model", str(checkpoint)]),
            "motet_gateway": ("gateway", ["--port", str(stack.port)]),
        }
        await stack.serve(services)
        await stack.until_workers({f"decode-{number}" for number in range(workers)})
        yield stack


# -------------------------------------------------------------------------------------------------------------- telling
def middle(runs: Sequence[Run], workers: int) -> Run:
    """Return the run with the median rate, of those with this many workers."""
    mine = sorted(
        (run for run in runs if run.workers == workers), key=lambda run: run.requests_per_second
    )
    return mine[len(mine) // 2]


def targets(runs: Sequence[Run], plan: Plan) -> list[Target]:
    least, most = min(plan.workers), max(plan.workers)
    if (least, most) != (1, 4):
        return []
    gain = middle(runs, most).requests_per_second / middle(runs, least).requests_per_second
    return [Target("requests/s, four workers / one", gain, LEAST, "times", most=False)]


def report(runs: Sequence[Run], plan: Plan) -> str:
    one = middle(runs, min(plan.workers)).requests_per_second
    rows = []
    for workers in plan.workers:
        run = middle(runs, workers)
        rates = [
            f"{run.requests_per_second:.2f}",
            f"{run.requests_per_second / one:.2f}",
            f"{run.good_per_second:.2f}",
        ]
        times = [
            f"{quantile(run.first, share) * 1e3:,.0f}" if run.first else "-"
            for share in (0.5, 0.95)
        ]
        rows.append(
            [str(workers), *rates, *times, str(sum(r.failed for r in runs if r.workers == workers))]
        )
    header = [
        "decode workers",
        "requests/s",
        "of one",
        "good requests/s",
        "TTFT p50, ms",
        "p95, ms",
        "failed",
    ]
    promised = targets(runs, plan)
    return "\n\n".join([table(header, rows), *([targets_table(promised)] if promised else [])])


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, "two workers for a second", RESULTS)
    parser.add_argument("--rounds", type=int, help="rounds of each number of workers (default: 3)")
    parser.add_argument("--seconds", type=float, help="seconds of the measurement (default: 20)")
    args = parser.parse_args(argv)
    plan, before = planned(args, Plan(), QUICK), conditions()
    runs = asyncio.run(measure(plan))
    print(f"{load_line(before)}\n\n{report(runs, plan)}", flush=True)
    write(args.file, before, plan, {"runs": runs}, targets(runs, plan))


if __name__ == "__main__":
    main()
