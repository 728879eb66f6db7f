"""Read the traffic and the SLO of `motet plan --traffic` from its options."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from motet_cli.bench import lengths
from motet_cli.bench.config import parse_duration
from motet_planner import traffic
from motet_planner.outcome import Slo
from motet_planner.sizing import Demand
from motet_planner.traces import read_trace
from motet_planner.traffic import Arrival
from motet_shared.errors import ConfigError

MAX_REQUESTS = 20_000  # of one simulation; of more, every n-th is simulated
DURATION = 600.0  # seconds of traffic by default, except for the shape `daily`

Requests = Callable[[], Iterable[Arrival]]
_SHAPES: dict[str, Callable[[float, float], tuple[traffic.Rate, float]]] = {
    "steady": lambda mean, seconds: traffic.steady(mean),
    "ramp": traffic.ramp,
    "bursts": lambda mean, seconds: traffic.bursts(mean, every=seconds / 5, length=seconds / 25),
    "daily": lambda mean, seconds: traffic.daily(mean),
}


@dataclass(frozen=True, kw_only=True)
class TrafficSummary:
    """Summarize a traffic: requests per second, mean tokens of prompts and replies."""

    rate: float
    prompt: int
    output: int


def read_demand(args: Namespace) -> tuple[Demand, TrafficSummary]:
    """Return the demand and its summary.

    Raises ConfigError that names the option, its value and the valid range.
    """
    slo = Slo(
        ttft=parse_duration("--ttft", args.ttft) or math.inf,
        itl=parse_duration("--itl", args.itl) or math.inf,
    )
    requests, seconds, sample = _recorded(args) if _rate(args.traffic) is None else _generated(args)
    some = list(islice(requests(), 2000))
    if not some:
        raise ConfigError(
            f"--traffic: {args.traffic!r} yields no request in {seconds:g} s; give more, or a longer --duration",
            param="--traffic",
        )
    demand = Demand(
        traffic=requests,
        seconds=seconds,
        slo=slo,
        share=share("--share", args.share),
        sample=sample,
    )
    rate = sum(1 for _ in requests()) * sample / seconds
    prompt, output = (
        round(sum(values) / len(some)) for values in zip(*[r[1:] for r in some], strict=True)
    )
    return demand, TrafficSummary(rate=rate, prompt=prompt, output=output)


def _rate(text: str) -> float | None:
    """Return requests per second; None for a text that is no number, but a file."""
    try:
        rate = float(text)
    except ValueError:
        return None
    if not 0 < rate < math.inf:
        raise ConfigError(
            f"--traffic: {text!r} is out of range; give requests per second above 0, or a trace file",
            param="--traffic",
        )
    return rate


def _generated(args: Namespace) -> tuple[Requests, float, int]:
    rate = _rate(args.traffic) or 0.0
    given = parse_duration("--duration", args.duration)
    seconds = given or (traffic.DAY if args.shape == "daily" else DURATION)
    sample = max(1, math.ceil(rate * seconds / MAX_REQUESTS))
    curve, most = _SHAPES[args.shape](rate / sample, seconds)
    prompt, output = (
        lengths.parse(f"--{name}", getattr(args, name)).draw for name in ("input", "output")
    )
    return (
        lambda: traffic.generate(curve, most, seconds, prompt, output, args.seed),
        seconds,
        sample,
    )


def _recorded(args: Namespace) -> tuple[Requests, float, int]:
    requests = read_trace(Path(args.traffic).expanduser())
    speed = args.traffic_speed
    if not 0 < speed < math.inf:
        raise ConfigError(f"--speed: {speed:g} is out of range; give more than 0", param="--speed")
    sample = max(1, math.ceil(len(requests) / MAX_REQUESTS))
    taken = [request._replace(at=request.at / speed) for request in requests[::sample]]
    return lambda: taken, max(taken[-1].at, 1.0), sample


def share(option: str, value: float, zero: bool = False) -> float:
    """Return `value` if it is a share. Raises ConfigError that names the option.

    zero: accept [0, 1) instead of (0, 1].
    """
    if not (0 <= value < 1 if zero else 0 < value <= 1):
        raise ConfigError(
            f"{option}: {value:g} is out of range; give {'0 to below 1' if zero else 'more than 0, up to 1'}",
            param=option,
        )
    return value
