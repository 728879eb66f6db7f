"""Find the highest request rate at which an engine meets its latency limits, with a seeded trace."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.engine.replay import Job, Limits, Replay
from motet_llm.engine.engine import Engine

GOOD_SHARE = 0.9  # of requests, at a rate that counts as sustained
MOST_STEPS = 8  # doublings or halvings


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Define Poisson arrivals for `seconds`; lengths are lognormal around their medians, in tokens.

    shared: share of prompts that begin with one of `prefixes` common prefixes of `prefix` tokens.
    limit: the max_tokens of each request, however long its reply is.
    """

    seconds: float = 20.0
    shared: float = 0.5
    prefixes: int = 4
    prefix: int = 512
    prompt: int = 128
    output: int = 48
    limit: int = 256
    vocab: int = 512
    seed: int = 0

    def jobs(self, rate: float) -> list[Job]:
        """Return the jobs of a rate, always the same; other rates have other prompts (cold cache)."""
        draw = random.Random(f"{self.seed} {rate:.6f}")
        prefixes = [self._tokens(draw, self.prefix) for _ in range(self.prefixes)]
        jobs: list[Job] = []
        now = 0.0
        while (now := now + draw.expovariate(rate)) < self.seconds or len(jobs) < 10:
            begin = draw.choice(prefixes) if draw.random() < self.shared else []
            prompt = begin + self._tokens(draw, self._length(draw, self.prompt))
            jobs.append(
                Job(now, prompt, min(self._length(draw, self.output), self.limit), self.limit)
            )
        return jobs

    @property
    def longest(self) -> int:
        """Return the most tokens of a request, output included."""
        return self.prefix + 4 * self.prompt + self.limit

    def _length(self, draw: random.Random, median: int) -> int:
        return max(2, min(4 * median, round(draw.lognormvariate(0, 0.6) * median)))

    def _tokens(self, draw: random.Random, count: int) -> list[int]:
        return [draw.randrange(self.vocab) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Goodput:
    """Hold a rate of arrivals and the rate of requests answered within the limits, per second."""

    rate: float
    good: float


def sustained(
    engine: Engine, trace: Trace, limits: Limits, *, first: float, probes: int
) -> Goodput:
    """Return the best rate found at which GOOD_SHARE of the requests meet the limits.

    Doubles or halves the rate from `first` on, then bisects `probes` times (in the logarithm).
    """

    def probe(rate: float) -> Goodput | None:
        jobs = trace.jobs(rate)
        replay = Replay(engine, jobs, limits, int(len(jobs) * (1 - GOOD_SHARE)))
        good = sum(map(limits.met, replay.run()))
        return None if replay.aborted else Goodput(rate, rate * good / len(jobs))

    best, rate = probe(first), first
    if best is None:
        for _ in range(MOST_STEPS):
            rate /= 2
            if (best := probe(rate)) is not None:
                break
        else:
            return Goodput(0.0, 0.0)
    else:
        for _ in range(MOST_STEPS):
            if (found := probe(2 * rate)) is None:
                break
            best, rate = found, 2 * rate
    low, high = rate, 2 * rate
    for _ in range(probes):
        middle = (low * high) ** 0.5
        found = probe(middle)
        low, high, best = (middle, high, found) if found is not None else (low, middle, best)
    return best
