"""Measure what it costs while nothing dies that connections outlive the gateway, around a fake engine.

`python benchmarks/run.py kept_connections --help`. Interleaved pairs of two stacks, one of them behind a descriptor
store; the tables go to standard output, the numbers to `results/kept_connections.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.network.plumbing import QUIET_SECONDS, RATE, one_token
from benchmarks.stack.fake_engine import CHARS, MODEL
from benchmarks.stack.stack import Stack, motet_stack
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Ratio, Target, median_interval, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER

RESULTS = RESULTS_FOLDER / "kept_connections.json"
MOST = 0.97  # of the tokens per second without a store: the price is 3 % at most
_CONNECTIONS = 300  # one after the other, for a pair


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define how much is measured."""

    streams: int = 128
    paced: int = 256
    seconds: float = 4.0
    repeats: int = 9


QUICK = Plan(streams=8, paced=8, seconds=0.5, repeats=1)


@dataclass
class Findings:
    """Hold the ratios, behind a store to without, of each measure; values are medians of both."""

    ratios: dict[str, Ratio] = field(default_factory=dict)
    values: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)

    def add(self, what: str, kept: float, plain: float) -> None:
        self.ratios.setdefault(what, Ratio(what)).pairs.append(kept / plain)
        both = self.values.setdefault(what, ([], []))
        both[0].append(kept)
        both[1].append(plain)


async def measure(plan: Plan) -> Findings:
    findings = Findings()
    async with AsyncExitStack() as exits:
        pairs = [
            [
                await exits.enter_async_context(motet_stack(rate=rate, keeps=keeps))
                for keeps in (True, False)
            ]
            for rate in (0.0, RATE)
        ]
        saturated, paced = pairs
        for number in range(plan.repeats):
            await _both(
                findings,
                saturated,
                number,
                "tokens/s, saturated",
                _rate(plan.streams, plan.seconds),
            )
            await _both(
                findings, paced, number, "gateway µs/token, paced", _cost(plan.paced, plan.seconds)
            )
            await _both(
                findings, saturated, number, "one-token request p50, ms", _one(plan.seconds)
            )
            await _both(findings, saturated, number, "new connections/s", _connections)
    return findings


async def _both(
    findings: Findings,
    stacks: Sequence[Stack],
    number: int,
    what: str,
    run: Callable[[Stack], Awaitable[float]],
) -> None:
    """Measure both stacks, the first one first in every other pair."""
    order = (0, 1) if number % 2 else (1, 0)
    values = [0.0, 0.0]
    for index in order:
        values[index] = await run(stacks[index])
        await asyncio.sleep(QUIET_SECONDS)
    findings.add(what, *values)


def _rate(streams: int, seconds: float) -> Callable[[Stack], Awaitable[float]]:
    async def run(stack: Stack) -> float:
        report = await stack.load(
            clients="sse", model=MODEL, streams=streams, seconds=seconds, chars=CHARS
        )
        return report.tokens / report.seconds

    return run


def _cost(streams: int, seconds: float) -> Callable[[Stack], Awaitable[float]]:
    async def run(stack: Stack) -> float:
        report = await stack.load(
            clients="sse", model=MODEL, streams=streams, seconds=seconds, chars=CHARS
        )
        return report.cpu["gateway"] / max(report.tokens, 1) * 1e6

    return run


def _one(seconds: float) -> Callable[[Stack], Awaitable[float]]:
    async def run(stack: Stack) -> float:
        return (await one_token(stack, seconds))[0]

    return run


async def _connections(stack: Stack) -> float:
    return await asyncio.to_thread(_connect_often, stack.port)


def _connect_often(port: int) -> float:
    """Return the requests per second of which each has a connection of its own."""
    request = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    began = time.perf_counter()
    for _ in range(_CONNECTIONS):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(request)
            while client.recv(4096):
                pass
    return _CONNECTIONS / (time.perf_counter() - began)


def targets(findings: Findings) -> list[Target]:
    """Return the targets that this run can judge."""
    ratio = findings.ratios["tokens/s, saturated"].median
    return [
        Target("tokens/s behind a descriptor store", ratio, MOST, "of those without", most=False)
    ]


def report(findings: Findings) -> str:
    rows = []
    for what, ratio in findings.ratios.items():
        low, high = median_interval(ratio.pairs)
        kept, plain = (sorted(values)[len(values) // 2] for values in findings.values[what])
        rows.append(
            [
                "sse",
                what,
                f"{plain:.2f}",
                f"{kept:.2f}",
                f"{ratio.median:.3f}",
                f"{low:.3f}–{high:.3f}",
            ]
        )
    header = ["clients", "measure", "without", "behind a store", "median ratio", "95 % interval"]
    return "\n\n".join([table(header, rows), targets_table(targets(findings))])


def run(plan: Plan, output: Path) -> Findings:
    """Measure, print the tables, and write the JSON file."""
    before = conditions()
    findings = asyncio.run(measure(plan))
    print(f"{load_line(before)}\n")
    print(report(findings), flush=True)
    write(output, before, plan, findings, targets(findings))
    return findings


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="kept_connections", description="Measure the price of connections that are kept."
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds, a smoke test")
    parser.add_argument("--seconds", type=float, help="length of each measurement")
    parser.add_argument("--repeats", type=int, help="interleaved pairs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON file of the results")
    args = parser.parse_args(argv)
    given = {
        name: value for name in ("seconds", "repeats") if (value := getattr(args, name)) is not None
    }
    run(Plan(**{**asdict(QUICK if args.quick else Plan()), **given}), args.output)


if __name__ == "__main__":
    main()
