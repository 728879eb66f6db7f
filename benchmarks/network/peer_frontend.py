"""Measure NVIDIA Dynamo's frontend with its mock engine, if `ai-dynamo` is installed.

MOTET_PEER_PYTHON names the interpreter of its environment, if that is another one. Like ours, its
frontend serves HTTP, renders the template, encodes and detokenizes; it gets the same clients and
vocabulary. Its mock engine models an accelerator's step time: `--speedup-ratio 1` is real time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.stack.fake_engine import CHARS, MODEL, save_checkpoint
from benchmarks.stack.stack import Stack, environment
from benchmarks.support.measures import Row, row
from motet_shared.quantiles import quantile
from motet_shared.testing import free_port

NAME = "dynamo"
SATURATED = 1_000_000  # times real pace
STREAMS = {SATURATED: (1, 32, 128, 256), 1: (32, 256)}


def interpreter() -> str:
    return os.environ.get("MOTET_PEER_PYTHON") or sys.executable


async def installed() -> bool:
    process = await asyncio.create_subprocess_exec(
        interpreter(),
        *("-c", "import dynamo.frontend, dynamo.mocker"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    return await process.wait() == 0


async def measure(
    seconds: float, rows: list[Row], one_token_ms: dict[str, tuple[float, float]]
) -> str:
    """Add the peer's figures to `rows` and `one_token_ms`; return why there are none, else ""."""
    if not await installed():
        return "ai-dynamo is not installed (pip install ai-dynamo ai-dynamo-runtime, or set MOTET_PEER_PYTHON)"
    for speedup, counts in STREAMS.items():
        async with dynamo_stack(speedup) as stack:
            if speedup == SATURATED:
                report = await stack.load(clients="one", model=MODEL, max_tokens=1, seconds=seconds)
                one_token_ms[NAME] = (
                    quantile(report.durations, 0.5) * 1e3,
                    quantile(report.durations, 0.99) * 1e3,
                )
            pace = "saturated" if speedup == SATURATED else "at its own pace"
            for streams in counts:
                report = await stack.load(
                    clients="sse", model=MODEL, streams=streams, seconds=seconds, chars=CHARS
                )
                rows.append(row(f"{NAME}, {pace}", "sse", streams, report))
    return ""


@contextlib.asynccontextmanager
async def dynamo_stack(speedup: int) -> AsyncIterator[Stack]:
    with tempfile.TemporaryDirectory(prefix="motet-bench-peer-") as name:
        folder = Path(name)
        hosts = ("DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST", "DYN_TCP_RESPONSE_STREAM_HOST")
        env = environment(
            DYN_FILE_KV=str(folder / "discovery"),
            DYN_LOG="warn",
            **dict.fromkeys(hosts, "127.0.0.1"),
        )
        stack = Stack(folder, free_port(), env)
        model = ["--model-path", str(save_checkpoint(folder / "bench")), "--model-name", MODEL]
        pace = ["--speedup-ratio", str(speedup), "--max-num-seqs", "512"]
        common = ["--discovery-backend", "file"]
        frontend = [
            "-m",
            "dynamo.frontend",
            "--http-host",
            "127.0.0.1",
            "--http-port",
            str(stack.port),
        ]
        try:
            await stack.spawn("frontend", [interpreter(), *frontend, *common])
            await stack.spawn(
                "engine", [interpreter(), "-m", "dynamo.mocker", *model, *pace, *common]
            )
            await stack.until_ready("/v1/models", MODEL)
            yield stack
        finally:
            await stack.stop()
