"""Measure a tenant's time to first token, alone and during a flood of another tenant.

`python benchmarks/run.py tenants --help`. NATS, tokenizer, gateway and engine run as processes with
pocket-chat; the clients are `motet bench`, each with the key of its tenant. Without `--limit` the
tenants have no limits: only the engine's fair sharing separates them. The numbers go to
`results/tenants.json`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.stack.stack import START_SECONDS, STOP_SECONDS, Stack, environment, nats_stack
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import AloneAndBeside, Target, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER, ROOT
from motet_shared.tenants import digest, new_key

RESULTS = RESULTS_FOLDER / "tenants.json"
QUIET, FLOOD = "quiet", "flood"
LIMIT = 1.5  # p95 during the flood over p95 alone


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define how much is measured; lengths in tokens."""

    model: str = str(ROOT / "models" / "pocket-chat")
    threads: int = 0
    rounds: int = 5
    requests: int = 40  # of the quiet tenant, alone and during the flood, per round
    rate: float = 2.0  # of them per second
    prompt: int = 64
    output: int = 16
    flood: int = 32  # requests of the other tenant at a time
    flood_prompt: int = 256
    flood_output: int = 64
    limit: int = 0  # concurrent_streams of the flooding tenant; 0: none
    settle: float = 3.0  # seconds from the start of the flood to the first request


QUICK = Plan(
    rounds=1,
    requests=3,
    rate=1.0,
    prompt=16,
    output=4,
    flood=3,
    flood_prompt=24,
    flood_output=8,
    settle=1.0,
)


@dataclass
class Findings(AloneAndBeside):
    """Hold the quiet tenant's seconds to first token, by round.

    flooded: completed replies of the other tenant, by round.
    """

    flooded: list[int] = field(default_factory=list)  # completed replies of the flood, by round


# ---------------------------------------------------------------------------------------------------------- the stack
@contextlib.asynccontextmanager
async def stack_of_tenants(plan: Plan) -> AsyncIterator[Stack]:
    """Yield a ready stack; each tenant's key is in the file of its name in the stack's folder."""
    async with nats_stack(OMP_NUM_THREADS=str(plan.threads)) as (stack, _):
        tenants = str(_tenants(stack.folder, plan.limit))
        services = {
            "motet_llm": ("decode", ["--model", plan.model, "--threads", str(plan.threads)]),
            "motet_tokenizer": ("tokenizer", ["--model", plan.model]),
            "motet_gateway": ("gateway", ["--port", str(stack.port), "--tenants-file", tenants]),
        }
        await stack.serve(services)
        yield stack


def _tenants(folder: Path, limit: int) -> Path:
    """Write a tenants file, and a file with each tenant's key.

    limit: concurrent replies of the flooding tenant; 0: no limit.
    """
    file = folder / "tenants.toml"
    limits = keys = ""
    for tenant in (QUIET, FLOOD):
        key = new_key()
        (folder / tenant).write_text(key)
        limits += f"[tenants.{tenant}]\n" + (
            f"concurrent_streams = {limit}\n" if limit and tenant == FLOOD else ""
        )
        keys += f'[[keys]]\ntenant = "{tenant}"\nsha256 = "{digest(key)}"\n'
    file.write_text(limits + keys)
    return file


# --------------------------------------------------------------------------------------------------------- the clients
def _client(stack: Stack, tenant: str, *options: str) -> list[str]:
    argv = [sys.executable, "-m", "motet_cli", "bench", f"http://127.0.0.1:{stack.port}"]
    # How many tokens a word has would be measured first, by requests of its own.
    return [
        *argv,
        "--api-key-file",
        str(stack.folder / tenant),
        "--tokens-per-word",
        "1.5",
        "--ignore-eos",
        *options,
    ]


async def _started(argv: list[str]) -> asyncio.subprocess.Process:
    quiet = asyncio.subprocess.DEVNULL
    env = environment(PYTHONPATH=os.pathsep.join([str(ROOT / "cli"), environment()["PYTHONPATH"]]))
    return await asyncio.create_subprocess_exec(
        *argv, env=env, stdout=quiet, stderr=asyncio.subprocess.PIPE
    )


async def quiet_times(stack: Stack, plan: Plan, seed: int) -> list[float]:
    """Return the quiet tenant's seconds to first token. Raises RuntimeError if a request failed."""
    report = stack.folder / "quiet.json"
    load = [
        "--rate",
        str(plan.rate),
        "--arrivals",
        "constant",
        "--requests",
        str(plan.requests),
        "--warmup",
        "1",
    ]
    lengths = ["--input", str(plan.prompt), "--output", str(plan.output), "--seed", str(seed)]
    process = await _started(
        _client(stack, QUIET, *load, *lengths, "--json", str(report), "--records")
    )
    limit = START_SECONDS + 10 * plan.requests / plan.rate
    try:
        _, errors = await asyncio.wait_for(process.communicate(), limit)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise RuntimeError(
            f"the quiet tenant's client ended with {process.returncode}: {errors.decode()[-2000:]}"
        )
    records: list[dict[str, Any]] = json.loads(await asyncio.to_thread(report.read_text))["records"]
    if failed := [record for record in records if record["error"] or not record["times"]]:
        raise RuntimeError(
            f"{len(failed)} of the quiet tenant's requests had no reply: {failed[0]}"
        )
    return [float(record["times"][0] - record["sent"]) for record in records]


@contextlib.asynccontextmanager
async def flooding(stack: Stack, plan: Plan, seed: int, counted: list[int]) -> AsyncIterator[None]:
    """Run the other tenant's requests; append the number of completed ones to `counted`."""
    report = stack.folder / "flood.json"
    load = [
        "--concurrency",
        str(plan.flood),
        "--duration",
        "1h",
        "--warmup",
        "0",
        "--json",
        str(report),
    ]
    lengths = [
        "--input",
        str(plan.flood_prompt),
        "--output",
        str(plan.flood_output),
        "--seed",
        str(seed),
    ]
    process = await _started(_client(stack, FLOOD, *load, *lengths))
    try:
        await asyncio.sleep(plan.settle)
        yield
        if process.returncode is not None:
            raise RuntimeError(f"the flood ended by itself with {process.returncode}")
    finally:
        counted.append(await _stopped(process, report))


async def _stopped(process: asyncio.subprocess.Process, report: Path) -> int:
    """Interrupt the client, which writes its report; return its number of completed requests."""
    if process.returncode is None:
        process.send_signal(2)
    try:
        await asyncio.wait_for(process.communicate(), STOP_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
    return int(json.loads(await asyncio.to_thread(report.read_text))["summary"]["completed"])


# ------------------------------------------------------------------------------------------------------------ the run
async def measured(plan: Plan) -> Findings:
    """Measure alone and during the flood in turn, alternating the order by round."""
    found = Findings()
    async with stack_of_tenants(plan) as stack:
        await quiet_times(stack, replace(plan, requests=2), 1_000_000)  # warm-up
        for number in range(plan.rounds):
            for beside in (False, True) if number % 2 == 0 else (True, False):
                seed = 2 * number + beside
                if not beside:
                    found.alone.append(await quiet_times(stack, plan, seed))
                    continue
                async with flooding(stack, plan, 10_000 + seed, found.flooded):
                    found.beside.append(await quiet_times(stack, plan, seed))
            print(
                f"  round {number + 1}: p95 beside the flood / alone {found.ratios[-1]:.2f}",
                flush=True,
            )
    return found


def run(plan: Plan, output: Path) -> Findings:
    """Measure, print the table, and write the JSON file."""
    before = conditions()
    plan = replace(plan, threads=plan.threads or len(os.sched_getaffinity(0)))
    found = asyncio.run(measured(plan))
    alone, beside = found.p95
    rows = [
        [
            "alone",
            f"{alone * 1e3:.1f}",
            f"{statistics.median(t for times in found.alone for t in times) * 1e3:.1f}",
        ],
        [
            "beside a flood",
            f"{beside * 1e3:.1f}",
            f"{statistics.median(t for x in found.beside for t in x) * 1e3:.1f}",
        ],
    ]
    targets = [Target("p95 TTFT beside a flood / alone", beside / alone, LIMIT, "times")]
    print(f"\n{load_line(before)}")
    print(
        f"{plan.requests * plan.rounds} requests each; the flood got {sum(found.flooded)} replies meanwhile."
    )
    print("Ratios of the rounds: " + ", ".join(f"{ratio:.2f}" for ratio in found.ratios) + "\n")
    print(
        table(["quiet tenant", "TTFT p95, ms", "p50, ms"], rows), targets_table(targets), sep="\n\n"
    )
    write(output, before, plan, asdict(found), targets)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(
        "What a tenant feels of another one that floods.", "a few requests", RESULTS, prog="tenants"
    )
    parser.add_argument("--model", help="checkpoint folder (default: models/pocket-chat)")
    parser.add_argument("--threads", type=int, help="threads of the engine (default: all cores)")
    parser.add_argument(
        "--rounds", type=int, help=f"rounds, alone and during the flood (default: {Plan.rounds})"
    )
    parser.add_argument(
        "--requests",
        type=int,
        help=f"requests of the quiet tenant per measurement (default: {Plan.requests})",
    )
    parser.add_argument(
        "--rate",
        type=float,
        help=f"requests per second of the quiet tenant (default: {Plan.rate:g})",
    )
    parser.add_argument(
        "--flood", type=int, help=f"concurrent requests of the other tenant (default: {Plan.flood})"
    )
    parser.add_argument(
        "--flood-prompt",
        type=int,
        help=f"approximate tokens of its prompts (default: {Plan.flood_prompt})",
    )
    parser.add_argument(
        "--flood-output", type=int, help=f"tokens of its replies (default: {Plan.flood_output})"
    )
    parser.add_argument(
        "--limit", type=int, help="concurrent_streams of the flooding tenant (default: none)"
    )
    args = parser.parse_args(argv)
    run(planned(args, Plan(), QUICK), args.file)


if __name__ == "__main__":
    main()
