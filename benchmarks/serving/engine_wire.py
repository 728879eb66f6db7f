"""Measure what a stack costs in front of vLLM: `--engine vllm` beside vLLM's own server.

`python benchmarks/run.py engine_wire --help`. Both run for the whole time, with the same checkpoint and
arguments, and are given the same requests in turn. The tables go to standard output, the numbers to
`results/engine_wire.json`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shlex
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.engine.checkpoint import SHAPES, random_checkpoint
from benchmarks.engine.peers import VLLM_PYTHON
from benchmarks.serving.served_stack import letters
from benchmarks.stack.stack import Stack, module_command, nats_stack
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.cache import cache_folder
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, median_interval, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER
from motet_cli.bench.exchange import exchange
from motet_cli.bench.http import Client
from motet_cli.bench.load import LoadGenerator
from motet_cli.bench.request import PATHS, Request, Shape
from motet_cli.bench.results.record import Record
from motet_cli.engines.environment import host_command, host_variables
from motet_shared.testing import free_port

RESULTS = RESULTS_FOLDER / "engine_wire.json"
START_SECONDS = 400.0  # vLLM compiles its model at the first start
REPLY_SECONDS = 300.0
SINGLE_OUTPUT = 4  # tokens of a reply whose first one is timed
NAMES = ("motet", "vllm")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define how much is measured.

    pairs: runs of all streams at each server. singles: lone requests at each server, beside each
    pair. cache: GiB of keys and values of each server. threads: that each server computes with; 0:
    as vLLM chooses.
    """

    shape: str = "qwen3-0.6b"
    streams: int = 32
    prompt: int = 32
    output: int = 32
    pairs: int = 20
    singles: int = 4
    threads: int = 0
    cache_space: int = 1
    engine_args: str = ""


QUICK = Plan(shape="tiny", streams=2, prompt=8, output=8, pairs=2, singles=2)


@dataclass
class Findings:
    """Hold tokens/s and seconds to the first token by server: one rate per run, lists of times."""

    rates: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in NAMES})
    ttft: dict[str, list[list[float]]] = field(default_factory=lambda: {name: [] for name in NAMES})

    @property
    def ratios(self) -> list[float]:
        """Return the stack's rate as a share of vLLM's, by pair."""
        pairs = zip(self.rates["motet"], self.rates["vllm"], strict=True)
        return [ours / theirs for ours, theirs in pairs]

    @property
    def added(self) -> list[float]:
        """Return the milliseconds by which the stack's median first token is later, by pair."""
        medians = [[statistics.median(times) for times in self.ttft[name]] for name in NAMES]
        return [(ours - theirs) * 1e3 for ours, theirs in zip(*medians, strict=True)]


class Server:
    """Send requests to one server and measure them."""

    def __init__(self, port: int, model: str):
        self._client = Client(f"http://127.0.0.1:{port}/v1")
        self._shape = Shape(endpoint="completions", model=model, extra={"ignore_eos": True})

    async def rate(self, prompts: Sequence[str], output: int) -> float:
        """Return tokens/s from the first request to the last token of replies at a time."""
        load = LoadGenerator(self._send, concurrency=len(prompts))
        measured = await load.run(iter([Request(0.0, prompt, output) for prompt in prompts]))
        return sum(record.tokens or 0 for record in measured.records) / measured.seconds

    async def first_token(self, prompt: str) -> float:
        """Return the seconds until the first text of a lone reply."""
        load = LoadGenerator(self._send, concurrency=1)
        measured = await load.run(iter([Request(0.0, prompt, SINGLE_OUTPUT)]))
        (record,) = measured.records
        return record.times[0] - record.sent

    async def _send(self, request: Request, record: Record, now: Callable[[], float]) -> None:
        body, path = self._shape.body(request), PATHS[self._shape.endpoint]
        await exchange(self._client, path, body, record, now, REPLY_SECONDS)
        if not record.ok or record.tokens != request.max_tokens:
            raise RuntimeError(
                f"a reply of {record.tokens} tokens instead of {request.max_tokens}:"
                f" {record.error} {record.message}"
            )

    def close(self) -> None:
        self._client.close()


# ----------------------------------------------------------------------------------------------------------- processes
def arguments(plan: Plan) -> list[str]:
    """Return the engine's arguments, the same for both servers."""
    length = plan.prompt + max(plan.output, SINGLE_OUTPUT) + 8
    own = f"--dtype bfloat16 --max-num-seqs {plan.streams} --max-model-len {length}"
    return shlex.split(f"{own} --no-enable-prefix-caching {plan.engine_args}")


def variables(plan: Plan) -> dict[str, str]:
    """Return the environment of both engines."""
    processors = sorted(os.sched_getaffinity(0))[: plan.threads]
    bound = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors))} if plan.threads else {}
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(plan.cache_space),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        **bound,
    }


@contextlib.asynccontextmanager
async def both_servers(plan: Plan, python: str, folder: Path) -> AsyncIterator[dict[str, Server]]:
    """Yield the two servers, ready: a stack with an engine host, and vLLM's own."""
    async with nats_stack() as (stack, _):
        stack.env |= variables(plan)
        stack.env.pop("OMP_NUM_THREADS", None)
        port = free_port()
        await _start_vllm(stack, python, folder, port, arguments(plan))
        await _start_stack(stack, python, folder, arguments(plan))
        servers = {"motet": Server(stack.port, folder.name), "vllm": Server(port, folder.name)}
        try:
            yield servers
        finally:
            for server in servers.values():
                server.close()


async def _start_vllm(
    stack: Stack, python: str, folder: Path, port: int, argv: Sequence[str]
) -> None:
    """Start vLLM's server, and wait for it: two that load at a time would need twice the memory."""
    module = "vllm.entrypoints.openai.api_server"
    place = ["--host", "127.0.0.1", "--port", str(port), "--model", str(folder)]
    named = ["--served-model-name", folder.name, "--uvicorn-log-level", "warning"]
    await stack.spawn("vllm", [python, "-m", module, *place, *named, *argv])
    await stack.until_ready("/health", seconds=START_SECONDS, port=port)


async def _start_stack(stack: Stack, python: str, folder: Path, argv: Sequence[str]) -> None:
    host = [f"{name}={value}" for name, value in host_variables().items()]
    flags = ["--instance", "decode-bench", "--stop-with-parent", "--engine", "vllm"]
    flags += ["--model", str(folder), f"--engine-args={shlex.join(argv)}"]
    await stack.spawn("decode", ["env", *host, *host_command(python), *flags])
    tokenizer = module_command("motet_tokenizer", "tokenizer-bench", "--model", str(folder))
    await stack.spawn("tokenizer", tokenizer)
    gateway = module_command("motet_gateway", "gateway-bench", "--port", str(stack.port))
    await stack.spawn("gateway", gateway)
    await stack.until_ready("/health/ready", seconds=START_SECONDS)


# ----------------------------------------------------------------------------------------------------------- measuring
async def measure(plan: Plan, python: str, cache: Path) -> Findings:
    """Run pairs in turn; which server comes first alternates."""
    findings = Findings()
    folder = random_checkpoint(plan.shape, cache)
    draw = random.Random(0)
    async with both_servers(plan, python, folder) as servers:
        for server in servers.values():  # warm-up
            await server.rate([letters(plan.prompt, i) for i in range(plan.streams)], plan.output)
        for pair in range(plan.pairs):
            number = draw.randrange(10**6)
            prompts = [letters(plan.prompt, number + i) for i in range(plan.streams)]
            order = NAMES if pair % 2 else NAMES[::-1]
            for name in order:
                findings.rates[name].append(await servers[name].rate(prompts, plan.output))
            times: dict[str, list[float]] = {name: [] for name in NAMES}
            for prompt in prompts[: plan.singles]:
                for name in order:
                    times[name].append(await servers[name].first_token(prompt))
            for name in NAMES:
                findings.ttft[name].append(times[name])
            print(f"  pair {pair + 1}: {_pair(findings)}", flush=True)
    return findings


def _pair(findings: Findings) -> str:
    ours, theirs = (findings.rates[name][-1] for name in NAMES)
    return f"{ours:.1f} and {theirs:.1f} tokens/s, first token {findings.added[-1]:+.2f} ms"


def targets(findings: Findings, plan: Plan) -> list[Target]:
    ratio, added = (statistics.median(found) for found in (findings.ratios, findings.added))
    what = f"tokens/s beside vLLM's own server, {plan.streams} streams"
    return [
        Target(what, ratio, 0.97, "times", most=False),
        Target("TTFT p50 beside vLLM's own server", added, 2.0, "ms"),
    ]


def report(findings: Findings, plan: Plan) -> str:
    rows = []
    for name, label in zip(NAMES, ("Motet, --engine vllm", "vLLM's own server"), strict=True):
        ttft = statistics.median(one for times in findings.ttft[name] for one in times)
        rows.append([label, f"{statistics.median(findings.rates[name]):.1f}", f"{ttft * 1e3:.2f}"])
    (low, high), (least, most) = map(median_interval, (findings.ratios, findings.added))
    ratio, added = (statistics.median(found) for found in (findings.ratios, findings.added))
    return "\n\n".join(
        [
            f"{plan.shape}, {plan.pairs} interleaved pairs; {plan.streams} streams with prompts of"
            f" {plan.prompt} and outputs of {plan.output} tokens, then lone requests.",
            table(["server", f"tokens/s at {plan.streams} streams", "TTFT p50, ms"], rows),
            f"Share of tokens/s {ratio:.3f} (95 % interval {low:.3f} to {high:.3f}); TTFT p50"
            f" {added:+.2f} ms ({least:+.2f} to {most:+.2f}).",
            targets_table(targets(findings, plan)),
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(
        "vLLM behind a stack beside vLLM's own server.", "a tiny model, two pairs", RESULTS
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), help="default: qwen3-0.6b")
    parser.add_argument("--streams", type=int, help="replies at a time (default: 32)")
    parser.add_argument("--pairs", type=int, help="runs of each server (default: 20)")
    parser.add_argument("--output-tokens", dest="output", type=int, help="default: 32")
    parser.add_argument("--threads", type=int, help="threads of each (default: vLLM's choice)")
    parser.add_argument("--engine-args", help="further arguments of both engines")
    parser.add_argument("--cache", type=Path, help="folder for checkpoints (bench in MOTET_CACHE)")
    args = parser.parse_args(argv)
    python, plan = os.environ.get(VLLM_PYTHON), planned(args, Plan(), QUICK)
    if not python:
        print(f"engine_wire: {VLLM_PYTHON} is not set (see benchmarks/README.md)")
        return
    before = conditions()
    findings = asyncio.run(measure(plan, python, args.cache or cache_folder()))
    print(f"{load_line(before)}\n\n{report(findings, plan)}", flush=True)
    write(args.file, before, plan, findings, targets(findings, plan))


if __name__ == "__main__":
    main()
