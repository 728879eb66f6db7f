"""Measure what interactive streams notice of a batch: their time between tokens, with and without.

`python benchmarks/run.py batches --help`. NATS with a store, tokenizer, gateway and engine run as
processes with pocket-chat. The batch has more lines than are answered meanwhile, and is cancelled
at the end of each measurement. The numbers go to `results/batches.json`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx

from benchmarks.stack.stack import Stack, nats_stack
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import (
    AloneAndBeside,
    Target,
    median_interval,
    table,
    targets_table,
)
from benchmarks.support.paths import RESULTS_FOLDER, ROOT
from motet_shared.quantiles import quantile

RESULTS = RESULTS_FOLDER / "batches.json"
LIMIT = 1.1  # p95 of the time between tokens beside a batch over that alone
MODEL = "pocket-chat"
CHAT = "/v1/chat/completions"
SETTLE = 1.0  # seconds from the beginning of a batch to the first request
LINES = 20_000


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define how much is measured; lengths in tokens."""

    rounds: int = 20
    requests: int = 8  # of each stream, alone and beside a batch, per round
    streams: int = 2  # interactive ones at a time
    pause: float = 0.2  # seconds between two requests of a stream
    output: int = 64  # tokens of interactive replies
    threads: int = 1
    batch_words: int = 100  # of a line's prompt
    batch_output: int = 64


QUICK = Plan(rounds=1, requests=1, streams=1, output=8, batch_words=10, batch_output=8)


@dataclass
class Findings(AloneAndBeside):
    """Hold seconds between tokens and to the first token, by round, and answered lines."""

    first_alone: list[float] = field(default_factory=list)
    first_beside: list[float] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)  # answered per round beside the streams
    lines_alone: int = 0  # answered per second without other requests


@contextlib.asynccontextmanager
async def stack_with_store(plan: Plan) -> AsyncIterator[Stack]:
    """Yield a ready stack whose gateway can run batches."""
    async with nats_stack(store=True, OMP_NUM_THREADS=str(plan.threads)) as (stack, _):
        model = str(ROOT / "models" / MODEL)
        services = {
            "motet_llm": ("decode", ["--model", model, "--threads", str(plan.threads)]),
            "motet_tokenizer": ("tokenizer", ["--model", model]),
            "motet_gateway": ("gateway", ["--port", str(stack.port)]),
        }
        await stack.serve(services)
        yield stack


def body_of(text: str, tokens: int, **fields: Any) -> dict[str, Any]:
    """Return a chat whose reply has so many tokens."""
    message = {"role": "user", "content": text}
    options = {"model": MODEL, "max_tokens": tokens, "ignore_eos": True}
    return {**options, "messages": [message], **fields}


# ------------------------------------------------------------------------------------------ the batch
@contextlib.asynccontextmanager
async def batch_of(http: httpx.AsyncClient, plan: Plan, seed: int) -> AsyncIterator[list[int]]:
    """Run a batch within the context; the list then has the number of lines that it answered."""
    lines = [
        {
            "custom_id": f"{number}",
            "method": "POST",
            "url": CHAT,
            "body": body_of(f"{seed} {number} " + "word " * plan.batch_words, plan.batch_output),
        }
        for number in range(LINES)
    ]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    files = {"file": ("lines.jsonl", data)}
    file = (await http.post("/v1/files", files=files, data={"purpose": "batch"})).json()
    asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    batch = (await http.post("/v1/batches", json=asked)).json()["id"]
    answered: list[int] = []
    try:
        await _until(http, batch, ("in_progress",))
        await asyncio.sleep(SETTLE)
        yield answered
    finally:
        await http.post(f"/v1/batches/{batch}/cancel")
        over = await _until(http, batch, ("cancelled", "failed", "completed"))
        answered.append(over["request_counts"]["completed"])
        for name in (file["id"], over["output_file_id"]):
            if name is not None:
                await http.delete(f"/v1/files/{name}")


async def _until(http: httpx.AsyncClient, batch: str, states: Sequence[str]) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            found: dict[str, Any] = (await http.get(f"/v1/batches/{batch}")).json()
            if found["status"] in states:
                return found
            await asyncio.sleep(0.1)


# ---------------------------------------------------------------------------------------- the streams
async def measured_streams(
    http: httpx.AsyncClient, plan: Plan, seed: int
) -> tuple[list[float], list[float]]:
    """Return the seconds between tokens, and to the first ones, of all interactive replies."""
    gaps: list[float] = []
    firsts: list[float] = []

    async def stream(number: int) -> None:
        for index in range(plan.requests):
            text = f"{seed} {number} {index}: What is two plus two?"
            times = await _arrivals(http, body_of(text, plan.output, stream=True))
            firsts.append(times[1] - times[0])
            gaps.extend(b - a for a, b in pairwise(times[1:]))
            await asyncio.sleep(plan.pause)

    async with asyncio.TaskGroup() as group:
        for number in range(plan.streams):
            group.create_task(stream(number))
    return gaps, firsts


async def _arrivals(http: httpx.AsyncClient, body: dict[str, Any]) -> list[float]:
    """Return when a request was sent, and when each chunk with a text came."""
    times = [perf_counter()]
    async with http.stream("POST", CHAT, json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                times.append(perf_counter())
    return times


async def measured(plan: Plan) -> Findings:
    """Measure alone and beside a batch in turn, alternating the order by round."""
    found = Findings()
    async with (
        stack_with_store(plan) as stack,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{stack.port}", timeout=60, trust_env=False
        ) as http,
    ):
        await measured_streams(http, replace(plan, requests=2), 1_000_000)  # warm-up
        async with batch_of(http, plan, 1_000_000) as answered:
            began = perf_counter()
            await asyncio.sleep(1.0 if plan == QUICK else 10.0)
        found.lines_alone = round(answered[0] / (perf_counter() - began + SETTLE))
        for number in range(plan.rounds):
            for beside in (False, True) if number % 2 == 0 else (True, False):
                if not beside:
                    gaps, firsts = await measured_streams(http, plan, 2 * number)
                    found.alone.append(gaps)
                    found.first_alone += firsts
                    continue
                async with batch_of(http, plan, number) as answered:
                    gaps, firsts = await measured_streams(http, plan, 2 * number + 1)
                found.lines += answered
                found.beside.append(gaps)
                found.first_beside += firsts
            print(f"  round {number + 1}: p95 ITL {found.ratios[-1]:.2f} times", flush=True)
    return found


def run(plan: Plan, output: Path) -> Findings:
    """Measure, print the table, and write the JSON file."""
    before = conditions()
    found = asyncio.run(measured(plan))
    sides = (("alone", found.alone, found.first_alone),
             ("beside a batch", found.beside, found.first_beside))  # fmt: skip
    rows = []
    for name, rounds, firsts in sides:
        gaps = [gap for one in rounds for gap in one]
        values = [*(quantile(gaps, q) for q in (0.5, 0.95, 0.99)), quantile(firsts, 0.95)]
        rows.append([name, *(f"{1e3 * value:.1f}" for value in values)])
    alone, beside = found.p95
    targets = [Target("p95 ITL beside a batch / alone", beside / alone, LIMIT, "times")]
    print(f"\n{load_line(before)}")
    print(f"Lines answered: {found.lines_alone} a second alone, {sum(found.lines)} beside streams")
    low, high = median_interval(found.ratios)
    print("Ratios of the rounds: " + ", ".join(f"{ratio:.2f}" for ratio in found.ratios))
    print(f"95 % confidence interval of their median: {low:.2f} to {high:.2f}\n")
    header = ["interactive streams", "ITL p50, ms", "p95, ms", "p99, ms", "TTFT p95, ms"]
    print(table(header, rows), targets_table(targets), sep="\n\n")
    write(output, before, plan, asdict(found), targets)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(
        "What interactive streams notice of a batch.", "a few requests", RESULTS, prog="batches"
    )
    for name, what in (
        ("rounds", "rounds, alone and beside a batch"),
        ("requests", "requests of each stream per measurement"),
        ("streams", "interactive streams at a time"),
        ("threads", "threads of the engine"),
    ):
        parser.add_argument(f"--{name}", type=int, help=f"{what} (default: {getattr(Plan, name)})")
    args = parser.parse_args(argv)
    run(planned(args, Plan(), QUICK), args.file)


if __name__ == "__main__":
    main()
