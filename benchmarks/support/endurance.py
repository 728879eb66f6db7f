"""Judge what lasts: whether latencies and memory change over the time of a long run.

Latencies of the first and the last sixth of the time are compared, with a bootstrap interval; slopes are least
squares, of latency over quantiles of each sixtieth of the time, of memory over samples behind the first sixth, in
which caches fill.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

from benchmarks.support.measures import Target, table
from motet_shared.quantiles import quantile

RATIO_LIMIT = 1.1  # of p99, last sixth by first
GROWTH_LIMIT = 0.02  # of memory, share per hour
MEMORY_EVERY = 5.0  # seconds

_Z = 1.96  # of a normal distribution, 95 %


@dataclass(frozen=True)
class Slope:
    """Hold a slope per unit of time, and its 95 % confidence interval."""

    value: float
    low: float
    high: float


def slope(times: Sequence[float], values: Sequence[float]) -> Slope:
    """Return the least-squares slope of values over times.

    The interval assumes independent errors; with fewer than three points it is unbounded.
    """
    middle, mean = statistics.fmean(times), statistics.fmean(values)
    spread = sum((time - middle) ** 2 for time in times)
    if len(times) < 3 or not spread:
        return Slope(0.0, -math.inf, math.inf)
    pairs = list(zip(times, values, strict=True))
    value = sum((time - middle) * (one - mean) for time, one in pairs) / spread
    rest = sum((one - mean - value * (time - middle)) ** 2 for time, one in pairs)
    freedom = len(times) - 2
    # Student's t by its expansion around the normal quantile.
    t = _Z + (_Z**3 + _Z) / (4 * freedom)
    error = t * math.sqrt(rest / freedom / spread)
    return Slope(value, value - error, value + error)


def ratio_interval(
    first: Sequence[float], last: Sequence[float], share: float, *, draws: int = 1000
) -> Slope:
    """Return the ratio of a quantile of `last` to that of `first`, with a bootstrap interval of 95 %."""
    rng = random.Random(0)
    ratios = sorted(
        quantile(rng.choices(last, k=len(last)), share)
        / quantile(rng.choices(first, k=len(first)), share)
        for _ in range(draws)
    )
    value = quantile(last, share) / quantile(first, share)
    return Slope(value, ratios[draws // 40], ratios[-1 - draws // 40])


@dataclass
class Endurance:
    """Hold the time in minutes of each request and its latency in seconds, and memory in MiB by process."""

    minutes: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    memory_minutes: list[float] = field(default_factory=list)
    memory: dict[str, list[float]] = field(default_factory=dict)

    def ends(self, total: float) -> tuple[list[float], list[float]]:
        """Return the latencies of the first and of the last sixth of `total` minutes."""
        pairs = list(zip(self.minutes, self.latencies, strict=True))
        first = [latency for minute, latency in pairs if minute < total / 6]
        return first, [latency for minute, latency in pairs if minute >= total * 5 / 6]

    def latency_slope(self, share: float, total: float) -> Slope:
        """Return the slope in ms per minute of a quantile of each sixtieth of the time."""
        step = total / 60
        parts: dict[int, list[float]] = {}
        for minute, latency in zip(self.minutes, self.latencies, strict=True):
            parts.setdefault(int(minute / step), []).append(latency * 1e3)
        return slope(
            [(part + 0.5) * step for part in parts],
            [quantile(values, share) for values in parts.values()],
        )

    def memory_slope(self, name: str, total: float) -> Slope:
        """Return the slope in MiB per hour, behind the first sixth, in which caches fill."""
        points = [
            (minute / 60, value)
            for minute, value in zip(self.memory_minutes, self.memory[name], strict=True)
            if minute >= total / 6
        ]
        if not points:
            return Slope(0.0, -math.inf, math.inf)
        return slope(*map(list, zip(*points, strict=True)))

    async def watch_memory(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Note the MiB by process that `read` returns in a thread, every few seconds until cancelled.

        A process that is not there has 0.
        """
        start = monotonic()
        while True:
            used = await asyncio.to_thread(read)
            for name in used.keys() - self.memory.keys():
                self.memory[name] = [0.0] * len(self.memory_minutes)
            self.memory_minutes.append((monotonic() - start) / 60)
            for name, values in self.memory.items():
                values.append(used.get(name, 0.0))
            await asyncio.sleep(MEMORY_EVERY)

    def targets(self, total: float, what: str) -> list[Target]:
        """Return the targets of a run of `total` minutes. what: of what latencies are, such as "frame"."""
        first, last = self.ends(total)
        if not (first and last):
            return []
        used = sum(values[-1] for values in self.memory.values())
        growth = sum(max(self.memory_slope(name, total).low, 0.0) for name in self.memory)
        ratio = ratio_interval(first, last, 0.99)
        return [
            Target(
                f"p99 per {what}, last sixth / first, low end of interval",
                ratio.low,
                RATIO_LIMIT,
                "×",
            ),
            Target(
                "memory's growth per hour, low ends of intervals",
                100 * growth / used,
                100 * GROWTH_LIMIT,
                "%",
            ),
        ]

    def memory_table(self, total: float) -> str:
        """Return a table of the memory of each process, with its slope."""
        rows = []
        for name, values in self.memory.items():
            line = self.memory_slope(name, total)
            rows.append(
                [
                    name,
                    f"{len(values)} samples",
                    f"{values[0]:.1f}",
                    f"{values[-1]:.1f}",
                    f"{line.value:+.2f} ({line.low:+.2f} to {line.high:+.2f})",
                ]
            )
        return table(["memory, MiB", "", "first", "last", "slope, MiB per hour"], rows)

    def latency_row(self, share: float, total: float, what: str) -> list[str]:
        """Return cells of a quantile: first and last sixth in ms, their ratio, and the slope in ms per minute."""
        first, last = self.ends(total)
        ratio, line = ratio_interval(first, last, share), self.latency_slope(share, total)
        return [
            f"p{100 * share:.0f} per {what}, ms",
            f"{len(self.latencies)}",
            f"{quantile(first, share) * 1e3:.1f}",
            f"{quantile(last, share) * 1e3:.1f}",
            f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
            f"{line.value:+.4f} ({line.low:+.4f} to {line.high:+.4f})",
        ]


LATENCY_HEADER = [
    "latency",
    "requests",
    "first sixth",
    "last sixth",
    "ratio",
    "slope, ms per minute",
]
