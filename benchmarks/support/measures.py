"""Compute rates, CPU time per token, added latency and statistics, and render tables of them."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from motet_shared.quantiles import quantile

if TYPE_CHECKING:
    from benchmarks.stack.load_generator import Report

Emitted = dict[
    str, list[float]
]  # by request id: when the fake engine emitted each token, monotonic seconds
PROCESSES = ("engine", "nats", "tokenizer", "gateway", "clients")


@dataclass(frozen=True)
class Row:
    """Hold one measurement: CPU time in µs per token by process, latency in ms.

    cores: cores that all processes together used, clients included. latency_ms: p50 and p99.
    """

    what: str
    clients: str
    streams: int
    tokens_per_second: float
    tokens_per_event: float
    cpu_us: dict[str, float]
    cores: float  # used by all processes, clients included
    latency_ms: tuple[float, float] | None = None  # p50, p99


def row(
    what: str, clients: str, streams: int, report: Report, emitted: Emitted | None = None
) -> Row:
    """Return the row of a report.

    emitted: emission times of tokens; adds the latency of every token in the measured time.
    """
    tokens = max(report.tokens, 1)
    latency = None
    if emitted is not None:
        added = added_latency(report, emitted)
        latency = (quantile(added, 0.5) * 1e3, quantile(added, 0.99) * 1e3) if added else None
    return Row(
        what=what,
        clients=clients,
        streams=streams,
        tokens_per_second=report.tokens / report.seconds,
        tokens_per_event=report.tokens / max(report.events, 1),
        cpu_us={name: spent / tokens * 1e6 for name, spent in report.cpu.items()},
        cores=sum(report.cpu.values()) / report.seconds,
        latency_ms=latency,
    )


def added_latency(report: Report, emitted: Emitted) -> list[float]:
    """Return seconds between emission and arrival of every token in the measured time."""
    added: list[float] = []
    for stream in report.streams:
        times = emitted[stream.request]
        for before, count, arrived in zip(
            stream.counts, stream.counts[1:], stream.times[1:], strict=False
        ):
            added += [arrived - times[index] for index in range(before, count)]
    return added


def fastest(run: Callable[[], object], seconds: float, least: int = 5) -> float:
    """Return milliseconds of the fastest of at least `least` runs that take `seconds` in all."""
    times: list[float] = []
    while len(times) < least or sum(times) < seconds:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a 95 % confidence interval of the median: two of the values, chosen by rank.

    Uses only the binomial distribution of ranks. For fewer than six values it returns their range.
    """
    ordered, count = sorted(values), len(values)
    below, rank = 0.0, 0
    while rank < count // 2 and (below := below + math.comb(count, rank) / 2**count) <= 0.025:
        rank += 1
    return ordered[max(0, rank - 1)], ordered[min(count - 1, count - rank)]


def middle(rows: Sequence[Row]) -> Row:
    """Return the row with the median rate."""
    return sorted(rows, key=lambda row: row.tokens_per_second)[len(rows) // 2]


@dataclass
class Ratio:
    """Hold ratios of interleaved pairs: how many times faster the first of each was."""

    what: str
    pairs: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.pairs)


# -------------------------------------------------------------------------------------------------------------- tables
@dataclass
class AloneAndBeside:
    """Hold latencies in seconds by round: alone, and beside other work."""

    alone: list[list[float]] = field(default_factory=list)
    beside: list[list[float]] = field(default_factory=list)

    @property
    def p95(self) -> tuple[float, float]:
        """Return p95 of all rounds together, alone and beside."""
        alone, beside = (
            quantile([one for times in rounds for one in times], 0.95)
            for rounds in (self.alone, self.beside)
        )
        return alone, beside

    @property
    def ratios(self) -> list[float]:
        """Return the ratio of the two p95 by round."""
        pairs = zip(self.alone, self.beside, strict=True)
        return [quantile(beside, 0.95) / quantile(alone, 0.95) for alone, beside in pairs]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the first two columns are left-aligned, the others right-aligned."""
    cells = [
        list(header),
        ["---" if index < 2 else "---:" for index in range(len(header))],
        *map(list, rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def rows_table(rows: Sequence[Row]) -> str:
    """Return a table of the rates and costs of every measurement."""
    processes = [
        name for name in (*PROCESSES, "frontend") if any(name in row.cpu_us for row in rows)
    ]
    header = [
        "what",
        "clients",
        "streams",
        "tokens/s",
        "tokens/event",
        *processes,
        "cores",
        "p50 ms",
        "p99 ms",
    ]
    return table(header, [_cells(row, processes) for row in rows])


def _cells(row: Row, processes: Sequence[str]) -> list[str]:
    cpu = [f"{row.cpu_us[name]:.2f}" if name in row.cpu_us else "" for name in processes]
    latency = (
        [f"{value:.2f}" for value in row.latency_ms] if row.latency_ms is not None else ["", ""]
    )
    rates = [f"{row.tokens_per_second:,.0f}", f"{row.tokens_per_event:.1f}"]
    return [row.what, row.clients, str(row.streams), *rates, *cpu, f"{row.cores:.2f}", *latency]


@dataclass(frozen=True)
class Target:
    """Hold a limit and the measured value.

    most: the value must not exceed the limit; False: it must reach it.
    """

    what: str
    value: float
    limit: float
    unit: str
    most: bool = True

    @property
    def met(self) -> bool:
        return self.value <= self.limit if self.most else self.value >= self.limit


def targets_table(targets: Sequence[Target]) -> str:
    header = ["target", "met", "limit", "measured"]
    return table(
        header,
        [
            [
                target.what,
                "yes" if target.met else "NO",
                f"{'≤' if target.most else '≥'} {target.limit:,g} {target.unit}",
                f"{target.value:,.2f}" if target.value < 1000 else f"{target.value:,.0f}",
            ]
            for target in targets
        ],
    )


def processor() -> str:
    """Return the model name of the processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
