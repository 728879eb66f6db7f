"""Measure the time to first token of conversations by routing policy, with fake engines.

`python benchmarks/run.py routing --help`. The tables go to standard output, the numbers to
`results/routing.json`. Each engine prefills at a fixed speed and has a prefix cache of bounded
size, so that two cores suffice for four engines; everything else is real.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from time import monotonic

from benchmarks.network.conversations import Conversation, conversations
from benchmarks.stack.fake_engine import FIRST_ID, MODEL, WORDS, save_checkpoint
from benchmarks.stack.stack import nats_stack
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER
from motet_shared.messages import Complete, Sampling, Text
from motet_shared.quantiles import quantile
from motet_shared.wire.bus import Bus
from motet_shared.wire.discovery import Directory

RESULTS = RESULTS_FOLDER / "routing.json"
POLICIES = ("random", "load", "prefix")
LEAST = 1.6  # median TTFT of random routing over that of prefix routing


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define the workers and the traffic.

    prefill: tokens per second of a worker. blocks: capacity of its cache. steps: its steps per
    second. rate: new conversations per second. pause: mean seconds between turns.
    """

    workers: int = 4
    prefill: float = 4000.0
    steps: float = 50.0
    blocks: int = 4096
    rate: float = 1.6
    seconds: float = 60.0
    pause: float = 3.0
    rounds: int = 3
    policies: tuple[str, ...] = POLICIES


QUICK = Plan(workers=2, prefill=50_000.0, steps=1000.0, rate=4.0, seconds=1.0, pause=0.01, rounds=1)


@dataclass
class Run:
    """Hold one trace under one policy.

    ttft: seconds to the first token of each turn.
    """

    policy: str
    round: int
    ttft: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    failed: int = 0


# ------------------------------------------------------------------------------------------------------------ measuring
async def run_all(plan: Plan) -> list[Run]:
    """Run every policy in every round, in turn; each round has a trace of its own."""
    runs = []
    for number in range(plan.rounds):
        trace = conversations(
            number,
            seconds=plan.seconds,
            rate=plan.rate,
            vocab=FIRST_ID + WORDS,
            first_id=FIRST_ID,
            mean_pause=plan.pause,
        )
        for policy in plan.policies:
            print(f"  round {number + 1}, {policy} ...", flush=True)
            runs.append(await _run(plan, policy, number, trace))
    return runs


async def _run(plan: Plan, policy: str, number: int, trace: list[Conversation]) -> Run:
    run = Run(policy, number)
    async with _stack(plan, policy) as bus:
        start = monotonic()
        async with asyncio.TaskGroup() as group:
            for conversation in trace:
                group.create_task(_converse(bus, conversation, start, run))
    return run


async def _converse(bus: Bus, conversation: Conversation, start: float, run: Run) -> None:
    await asyncio.sleep(start + conversation.start - monotonic())
    tokens: list[int] = []
    for turn in conversation.turns:
        await asyncio.sleep(turn.pause)
        tokens += turn.tokens
        requested, first = monotonic(), 0.0
        request = Complete(
            model=MODEL,
            prompt=list(tokens),
            max_tokens=turn.output,
            sampling=Sampling(ignore_eos=True),
            stop=[],
        )
        async with bus.open("tokenizer", request, deadline=120.0) as stream:
            async for body in stream:
                if isinstance(body, Text):
                    first = first or monotonic()
                    tokens += body.ids
        if stream.end is None or stream.end.usage is None or not first:
            run.failed += 1
            return
        run.ttft.append(first - requested)
        run.prompt_tokens += stream.end.usage.prompt_tokens
        run.cached_tokens += stream.end.usage.cached_tokens


@contextlib.asynccontextmanager
async def _stack(plan: Plan, policy: str) -> AsyncIterator[Bus]:
    """Start NATS, a tokenizer and the workers; yield a bus to call them."""
    async with nats_stack() as (stack, nats):
        bus = await nats.bus("gateway")
        try:
            checkpoint = save_checkpoint(stack.folder / MODEL)
            engine = [
                "--rate",
                str(plan.steps),
                "--prefill",
                str(plan.prefill),
                "--blocks",
                str(plan.blocks),
            ]
            for number in range(plan.workers):
                await stack.start("benchmarks.stack.fake_engine", f"decode-{number}", *engine)
            await stack.start(
                "motet_tokenizer", "tokenizer-0", "--model", str(checkpoint), "--routing", policy
            )
            await bus.directory.wait_for(lambda directory: _ready(directory, plan.workers), 60.0)
            await asyncio.sleep(1.0)  # until the tokenizer has heartbeats of all workers
            yield bus
        finally:
            await bus.close()


def _ready(directory: Directory, workers: int) -> bool:
    return len(directory.ready("decode")) == workers and bool(directory.ready("tokenizer"))


# -------------------------------------------------------------------------------------------------------------- telling
def report(runs: Sequence[Run], plan: Plan) -> str:
    rows = []
    for policy in plan.policies:
        mine = [run for run in runs if run.policy == policy]
        times = [seconds for run in mine for seconds in run.ttft]
        cached = sum(run.cached_tokens for run in mine) / max(
            1, sum(run.prompt_tokens for run in mine)
        )
        failed = sum(run.failed for run in mine)
        cells = [f"{quantile(times, share) * 1e3:,.0f}" for share in (0.5, 0.95)]
        rows.append([policy, f"{len(times):,}", f"{failed}", f"{cached:.0%}", *cells])
    header = ["routing", "turns", "failed", "of their tokens cached", "TTFT p50, ms", "p95, ms"]
    return "\n\n".join([table(header, rows), targets_table(targets(runs))])


def targets(runs: Sequence[Run]) -> list[Target]:
    """Return the median TTFT of random routing over that of ours; the median of the rounds."""
    ratios = []
    for number in {run.round for run in runs}:
        found = {
            run.policy: quantile(run.ttft, 0.5) for run in runs if run.round == number and run.ttft
        }
        if {"random", "prefix"} <= found.keys():
            ratios.append(found["random"] / found["prefix"])
    return (
        [Target("TTFT p50, random / prefix", quantile(ratios, 0.5), LEAST, "times", most=False)]
        if ratios
        else []
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, "two workers and a short trace", RESULTS)
    parser.add_argument(
        "--policies", nargs="+", choices=POLICIES, help="those to run (default: all)"
    )
    parser.add_argument("--rounds", type=int, help="traces, each under every policy (default: 3)")
    parser.add_argument(
        "--seconds", type=float, help="seconds in which conversations begin (default: 60)"
    )
    parser.add_argument("--rate", type=float, help="new conversations per second (default: 1.6)")
    args = parser.parse_args(argv)
    plan, before = planned(args, Plan(), QUICK), conditions()
    runs = asyncio.run(run_all(plan))
    print(f"{load_line(before)}\n\n{report(runs, plan)}", flush=True)
    write(args.file, before, plan, {"runs": runs}, targets(runs))


if __name__ == "__main__":
    main()
