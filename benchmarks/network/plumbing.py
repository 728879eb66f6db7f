"""Measure the plumbing, engine → NATS → tokenizer → gateway → client, around a fake engine.

`python benchmarks/run.py plumbing --help`. The tables go to standard output, the numbers to
`results/plumbing.json`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.network import peer_frontend
from benchmarks.stack.fake_engine import CHARS, MODEL
from benchmarks.stack.stack import Stack, motet_stack
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import (
    Ratio,
    Row,
    Target,
    middle,
    row,
    rows_table,
    table,
    targets_table,
)
from benchmarks.support.paths import RESULTS_FOLDER
from motet_shared.quantiles import quantile

RESULTS = RESULTS_FOLDER / "plumbing.json"
RATE = 40.0  # steps per second of the paced engine: 25 ms between tokens
CLIENTS = ("sse", "websocket")
QUIET_SECONDS = 0.5  # until the streams of the last load are cancelled


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define how much is measured."""

    saturated: tuple[int, ...] = (1, 32, 128, 256)
    paced: tuple[int, ...] = (1, 32, 256)
    compared: tuple[int, ...] = (32, 128, 256)  # with one message per token
    seconds: float = 3.0
    repeats: int = 3
    peer: bool = True


QUICK = Plan(saturated=(8,), paced=(8,), compared=(8,), seconds=0.5, repeats=1, peer=False)


@dataclass
class Findings:
    """Hold all measurements.

    one_token_ms: p50 and p99 of one-token requests by server. peer: why the peer was not measured.
    """

    rows: list[Row] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    one_token_ms: dict[str, tuple[float, float]] = field(
        default_factory=dict
    )  # p50, p99 by what answered
    peer: str = ""  # why it was not measured


# ------------------------------------------------------------------------------------------------------------ measuring
async def measure(plan: Plan) -> Findings:
    findings = Findings()
    await _saturated(plan, findings)
    await _paced(plan, findings)
    if plan.peer:
        findings.peer = await peer_frontend.measure(
            plan.seconds, findings.rows, findings.one_token_ms
        )
    return findings


async def _saturated(plan: Plan, findings: Findings) -> None:
    """Measure at full speed and, in interleaved pairs, without step batching and coalescing."""
    async with motet_stack() as stack, motet_stack(batched=False) as one_by_one:
        findings.one_token_ms["motet"] = await one_token(stack, plan.seconds)
        for clients, streams in _grid(plan.saturated):
            runs, slow, ratio = [], [], Ratio(f"{streams} × {clients}")
            for _ in range(plan.repeats):
                runs.append(await _run(stack, "saturated", clients, streams, plan.seconds))
                if streams in plan.compared:
                    slow.append(
                        await _run(one_by_one, "one by one", clients, streams, plan.seconds)
                    )
                    ratio.pairs.append(runs[-1].tokens_per_second / slow[-1].tokens_per_second)
            findings.rows.append(middle(runs))
            if slow:
                findings.rows.append(middle(slow))
                findings.ratios.append(ratio)


async def _paced(plan: Plan, findings: Findings) -> None:
    async with motet_stack(rate=RATE) as stack:
        for clients, streams in _grid(plan.paced):
            findings.rows.append(
                await _run(stack, f"{RATE:g} steps/s", clients, streams, plan.seconds, paced=True)
            )


def _grid(streams: Sequence[int]) -> Iterator[tuple[str, int]]:
    yield from ((clients, count) for count in streams for clients in CLIENTS)


async def _run(
    stack: Stack, what: str, clients: str, streams: int, seconds: float, paced: bool = False
) -> Row:
    report = await stack.load(
        clients=clients, model=MODEL, streams=streams, seconds=seconds, chars=CHARS, arrivals=paced
    )
    await asyncio.sleep(QUIET_SECONDS)
    return row(what, clients, streams, report, await stack.take_emitted(streams) if paced else None)


async def one_token(stack: Stack, seconds: float, model: str = MODEL) -> tuple[float, float]:
    """Return p50 and p99 in ms of a one-token request on a kept-alive connection."""
    report = await stack.load(clients="one", model=model, max_tokens=1, seconds=seconds)
    return quantile(report.durations, 0.5) * 1e3, quantile(report.durations, 0.99) * 1e3


# ------------------------------------------------------------------------------------------------------------- telling
def targets(findings: Findings) -> list[Target]:
    """Return the targets that this run can judge."""
    found = {(entry.what, entry.clients, entry.streams): entry for entry in findings.rows}
    paced = f"{RATE:g} steps/s"
    result = []
    for clients in CLIENTS:
        if (entry := found.get(("saturated", clients, 128))) is not None:
            name = f"128 saturated streams, {clients}"
            result.append(Target(name, entry.tokens_per_second, 120_000, "tokens/s", most=False))
            result.append(Target(f"{name}: gateway CPU", entry.cpu_us["gateway"], 3, "µs/token"))
    for clients, limit in (("websocket", 16), ("sse", 12)):
        if (entry := found.get((paced, clients, 256))) is not None:
            result.append(
                Target(
                    f"256 × {paced}, {clients}: gateway CPU",
                    entry.cpu_us["gateway"],
                    limit,
                    "µs/token",
                )
            )
    p50, p99 = findings.one_token_ms["motet"]
    result += [
        Target("one-token request p50", p50, 1.5, "ms"),
        Target("one-token request p99", p99, 4.0, "ms"),
    ]
    result += [
        Target(f"step batching and coalescing, {r.what}", r.median, 4, "times", most=False)
        for r in findings.ratios
    ]
    return result


def report(findings: Findings) -> str:
    one = [
        [name, "streamed", f"{p50:.2f}", f"{p99:.2f}"]
        for name, (p50, p99) in findings.one_token_ms.items()
    ]
    ratios = [
        [r.what, "tokens/s", f"{r.median:.1f}", f"{min(r.pairs):.1f}–{max(r.pairs):.1f}"]
        for r in findings.ratios
    ]
    parts = [
        "CPU in µs per token by process; p50 and p99: from the engine's emission to the client, ms.",
        rows_table(findings.rows),
        "One-token request on a kept-alive connection, to its last byte:",
        table(["frontend", "reply", "p50 ms", "p99 ms"], one),
        "Step batching and coalescing against one message per token (interleaved pairs):",
        table(["streams", "of", "median ratio", "range"], ratios),
        targets_table(targets(findings)),
    ]
    if findings.peer:
        parts.append(f"Peer: {findings.peer}")
    return "\n\n".join(parts)


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
        prog="plumbing", description="Measure what the plumbing costs."
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds, a smoke test")
    parser.add_argument("--seconds", type=float, help="length of each measurement")
    parser.add_argument("--repeats", type=int, help="interleaved pairs per comparison")
    parser.add_argument("--no-peer", action="store_true", help="do not start the peer's frontend")
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON file of the results")
    args = parser.parse_args(argv)
    given = {
        name: value for name in ("seconds", "repeats") if (value := getattr(args, name)) is not None
    }
    plan = QUICK if args.quick else Plan()
    run(Plan(**{**asdict(plan), **given, "peer": plan.peer and not args.no_peer}), args.output)


if __name__ == "__main__":
    main()
