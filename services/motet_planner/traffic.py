"""Requests to come: when, with how long a prompt, and how long a reply. Made from a seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

Length = Callable[[Random], int]  # tokens, at least 1
Rate = Callable[[float], float]  # requests per second, by the seconds since the beginning
DAY = 86400.0


class Arrival(NamedTuple):
    """`at` seconds after the beginning; tokens."""

    at: float
    prompt: int
    output: int


def generate(rate: Rate, most: float, seconds: float, prompt: Length, output: Length, seed: int) -> Iterator[Arrival]:
    """A Poisson process with a rate that changes, up to `most`; the same for the same seed."""
    rng, now = Random(f"{seed}/traffic"), 0.0
    while True:
        now += rng.expovariate(most)
        if now >= seconds:
            return
        if rng.random() * most < rate(now):
            yield Arrival(now, prompt(rng), output(rng))


def steady(mean: float) -> tuple[Rate, float]:
    """(rate, its maximum)."""
    return lambda now: mean, mean


def ramp(mean: float, seconds: float, share: float = 0.8) -> tuple[Rate, float]:
    """From `1 - share` of the mean up to `1 + share` of it, evenly."""
    return lambda now: mean * (1 - share + 2 * share * now / seconds), mean * (1 + share)


def bursts(mean: float, every: float, length: float, height: float = 4.0) -> tuple[Rate, float]:
    """Every so often `height` times as many for `length` seconds; `mean` over all."""
    calm = mean / (1 + (height - 1) * length / every)
    return lambda now: calm * (height if now % every >= every - length else 1.0), calm * height


def daily(mean: float, share: float = 0.8) -> tuple[Rate, float]:
    """A day, from midnight: quietest at 4 o'clock, busiest at 16."""
    return lambda now: mean * (1 - share * math.cos(2 * math.pi * (now / DAY - 4 / 24))), mean * (1 + share)


def lognormal(median: float, sigma: float, most: int) -> Length:
    """Lengths with a long tail, up to `most`."""
    return lambda rng: max(1, min(most, round(median * rng.lognormvariate(0.0, sigma))))


def fixed(length: int) -> Length:
    return lambda rng: length
