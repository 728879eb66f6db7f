"""Write a run as JSON: its configuration, its results and, with --records, each request."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from motet_cli.bench.config import BenchConfig
from motet_cli.bench.load import Measured
from motet_cli.bench.request import Shape
from motet_cli.bench.results.record import Record
from motet_cli.bench.results.summary import Summary
from motet_cli.bench.tokens_per_word import TokensPerWord
from motet_cli.bench.workload import Workload

FORMAT = 1  # incremented when a member changes its meaning


def write(
    path: Path,
    config: BenchConfig,
    shape: Shape,
    scale: TokensPerWord,
    started: datetime,
    summary: Summary,
    measured: Measured,
) -> None:
    """Write the report atomically. All times are seconds."""
    data: dict[str, Any] = {
        "motet_bench": FORMAT,
        "url": config.base,
        "started": started.isoformat(timespec="seconds"),
        "config": _config(config, shape, scale),
        "summary": summary,
    }
    if config.records:
        data["records"] = [_record(record) for record in measured.records]
    part = path.with_name(path.name + ".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n")
    part.replace(path)


def _config(config: BenchConfig, shape: Shape, scale: TokensPerWord) -> dict[str, Any]:
    return {
        "model": shape.model,
        "endpoint": shape.endpoint,
        "temperature": shape.temperature,
        "extra": shape.extra,
        "trace": None if config.trace is None else str(config.trace.path),
        "speed": config.speed,
        "concurrency": config.concurrency,
        "requests": config.requests,
        "duration": config.duration,
        "warmup": config.warmup,
        "timeout": config.timeout,
        "tokens_per_word": scale.per_word,
        "tokens_of_template": scale.overhead,
        **_workload(config.workload),
    }


def _workload(workload: Workload) -> dict[str, Any]:
    return {
        "seed": workload.seed,
        "input": workload.input.text,
        "output": workload.output.text,
        "rate": workload.rate,
        "arrivals": workload.process,
        "prefix_share": workload.prefix_share,
        "prefix_length": workload.prefix_length.text,
        "prefixes": workload.prefixes,
    }


def _record(record: Record) -> dict[str, Any]:
    return {**asdict(record), "output_tokens": record.output_tokens}
