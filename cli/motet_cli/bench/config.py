"""Check the options of `motet bench` before any request is sent."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec

from motet_cli.bench import lengths
from motet_cli.bench.request import Endpoint
from motet_cli.bench.results import plot
from motet_cli.bench.results.summary import Limits
from motet_cli.bench.trace import Trace
from motet_cli.bench.workload import Workload
from motet_shared.errors import ConfigError
from motet_shared.process.config import Duration

DEFAULT_CONCURRENCY = 8
DEFAULT_REQUESTS = 100


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Hold the checked settings of one run.

    base: URL of the API, ending in /v1.
        concurrency: requests in flight (closed loop); None: each request has an arrival time.
        duration, timeout: seconds.
    """

    base: str
    model: str | None
    endpoint: Endpoint
    api_key_file: str | None
    workload: Workload
    trace: Trace | None
    speed: float
    concurrency: int | None
    requests: int | None
    duration: float | None
    warmup: int
    timeout: float
    tokens_per_word: float | None
    temperature: float
    extra: dict[str, Any]
    limits: Limits
    price_per_hour: float | None
    json: Path | None
    records: bool
    plot: Path | None


def configure(args: Namespace) -> BenchConfig:
    """Return the checked settings. Raises ConfigError that names option, value and remedy."""
    _check_numbers(args)
    paced = args.rate is not None or args.trace is not None
    concurrency = None if paced else args.concurrency or DEFAULT_CONCURRENCY
    duration = parse_duration("--duration", args.duration)
    requests = args.requests
    if requests is None and duration is None and args.trace is None:
        requests = DEFAULT_REQUESTS
    limits = Limits(
        **{
            name: parse_duration(f"--{name}", getattr(args, name))
            for name in ("ttft", "ttfa", "itl", "e2e")
        }
    )
    return BenchConfig(
        base=base_url(args.url),
        model=args.model,
        endpoint=args.endpoint,
        api_key_file=args.api_key_file,
        workload=_workload(args),
        trace=None if args.trace is None else Trace(Path(args.trace).expanduser(), args.seed),
        speed=args.speed,
        concurrency=concurrency,
        requests=requests,
        duration=duration,
        warmup=args.warmup,
        timeout=parse_duration("--timeout", args.timeout) or 0.0,
        tokens_per_word=args.tokens_per_word,
        temperature=args.temperature,
        extra=_extra(args.extra, args.ignore_eos),
        limits=limits,
        price_per_hour=args.price_per_hour,
        json=None if args.json is None else _writable("--json", args.json),
        records=args.records,
        plot=None if args.plot is None else plot.check(args.plot),
    )


def base_url(url: str) -> str:
    """Return the URL with /v1 appended unless it ends so already."""
    return url.rstrip("/").removesuffix("/v1") + "/v1"


def _workload(args: Namespace) -> Workload:
    return Workload(
        seed=args.seed,
        input=lengths.parse("--input", args.input),
        output=lengths.parse("--output", args.output),
        rate=args.rate,
        process=args.arrivals,
        prefix_share=args.prefix_share,
        prefix_length=lengths.parse("--prefix-length", args.prefix_length),
        prefixes=args.prefixes,
    )


# Option → lower bound, and whether the bound itself is excluded.
_BOUNDS: dict[str, tuple[float, bool]] = {
    "concurrency": (1, False),
    "rate": (0, True),
    "speed": (0, True),
    "requests": (1, False),
    "warmup": (0, False),
    "prefix_share": (0, False),
    "prefixes": (1, False),
    "tokens_per_word": (0, True),
    "temperature": (0, False),
    "price_per_hour": (0, False),
}


def _check_numbers(args: Namespace) -> None:
    for name, (low, above) in _BOUNDS.items():
        value, option = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is None:
            continue
        if not (low < value if above else low <= value) or value == float("inf"):
            raise ConfigError(
                f"{option}: {value} is out of range; give {'more than' if above else 'at least'} {low}",
                param=option,
            )
    if args.prefix_share > 1:
        raise ConfigError(
            f"--prefix-share: {args.prefix_share} is out of range; give 0 to 1",
            param="--prefix-share",
        )
    if args.speed != 1 and args.trace is None:
        raise ConfigError(
            "--speed: applies only to --trace; for generated requests give --rate",
            param="--speed",
        )
    if args.records and args.json is None:
        raise ConfigError(
            "--records: records are written to the JSON report; give --json FILE too",
            param="--records",
        )


def parse_duration(option: str, text: str | None) -> float | None:
    """Parse a duration such as 250ms, 2s or 5m; return seconds, None for None.

    Raises ConfigError that names the option.
    """
    if text is None:
        return None
    try:
        seconds = float(get_args(Duration)[1].parse(text))
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ConfigError(
            f"{option}: {text!r} is not a duration above 0; give one such as 250ms, 2s or 5m",
            param=option,
        )
    return seconds


def _extra(text: str, ignore_eos: bool) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(
            f'--extra: {text!r} is not a JSON object ({error}); give one such as {{"top_k": 1}}',
            param="--extra",
        ) from None
    return {**({"ignore_eos": True} if ignore_eos else {}), **found}


def _writable(option: str, path: str) -> Path:
    target = Path(path).expanduser()
    if not target.parent.is_dir() or target.is_dir():
        raise ConfigError(
            f"{option}: {path!r} is not a file in an existing folder; give another path",
            param=option,
        )
    return target
