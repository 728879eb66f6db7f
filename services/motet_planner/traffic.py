"""Generate requests from a seed: arrival times, prompt lengths and reply lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

Length = Callable[[Random], int]  # tokens, at least 1
Rate = Callable[[float], float]  # requests per second, by seconds since the beginning
DAY = 86400.0


class Arrival(NamedTuple):
    """Represent a request that arrives `at` seconds after the beginning; lengths in tokens."""

    at: float
    prompt: int
    output: int


def generate(
    rate: Rate, most: float, seconds: float, prompt: Length, output: Length, seed: int
) -> Iterator[Arrival]:
    """Yield a Poisson process whose rate varies, up to `most` per second; repeatable by `seed`."""
    rng, now = Random(f"{seed}/traffic"), 0.0
    while True:
        now += rng.expovariate(most)
        if now >= seconds:
            return
        if rng.random() * most < rate(now):
            yield Arrival(now, prompt(rng), output(rng))


def steady(mean: float) -> tuple[Rate, float]:
    """Return a constant rate and its maximum."""
    return lambda now: mean, mean


def ramp(mean: float, seconds: float, share: float = 0.8) -> tuple[Rate, float]:
    """Return a linearly rising rate, `1 - share` to `1 + share` of the mean; and its maximum."""
    return lambda now: mean * (1 - share + 2 * share * now / seconds), mean * (1 + share)


def bursts(mean: float, every: float, length: float, height: float = 4.0) -> tuple[Rate, float]:
    """Return a rate with bursts, and its maximum.

    For the last `length` of every `every` seconds the rate is `height` times as high; its mean is
    `mean`.
    """
    calm = mean / (1 + (height - 1) * length / every)
    return lambda now: calm * (height if now % every >= every - length else 1.0), calm * height


def daily(mean: float, share: float = 0.8) -> tuple[Rate, float]:
    """Return a rate over a day from midnight, lowest at 4:00, highest at 16:00; and its maximum."""
    return lambda now: mean * (1 - share * math.cos(2 * math.pi * (now / DAY - 4 / 24))), mean * (
        1 + share
    )


def lognormal(median: float, sigma: float, most: int) -> Length:
    """Return lengths with a long tail, up to `most` tokens."""
    return lambda rng: max(1, min(most, round(median * rng.lognormvariate(0.0, sigma))))


def fixed(length: int) -> Length:
    """Return a length that is always `tokens`."""
    return lambda rng: length
