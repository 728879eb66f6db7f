"""Run the real stack around a checkpoint, and the same load on its engine alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from bisect import bisect_right
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from benchmarks.engine.checkpoint import CHARS
from benchmarks.engine.figures import decode_rate
from benchmarks.stack.load_generator import Report
from benchmarks.stack.stack import Stack, environment, nats_stack

WARM_SECONDS = 2.0
# Both prefill at full speed: what is compared is decoding, and no stream is to end before the last one has begun.
FLAGS = {"decode_slowdown": 0, "max_running": 64}


@contextlib.asynccontextmanager
async def served_stack(
    folder: Path, *, threads: int, weights: str, tokens: int
) -> AsyncIterator[Stack]:
    """Yield a ready stack: NATS, tokenizer, gateway, and an engine with room for `tokens`."""
    async with nats_stack(OMP_NUM_THREADS=str(threads)) as (stack, _):
        flags = {**FLAGS, "threads": threads, "weights": weights, "num_blocks": -(-tokens // 16)}
        engine = [
            part
            for flag, value in flags.items()
            for part in (f"--{flag.replace('_', '-')}", str(value))
        ]
        services = {
            "motet_llm": ("decode", ["--model", str(folder), *engine]),
            "motet_tokenizer": ("tokenizer", ["--model", str(folder)]),
            "motet_gateway": ("gateway", ["--port", str(stack.port)]),
        }
        await stack.serve(services)
        yield stack


async def pairs(
    folder: Path,
    *,
    streams: int,
    prompt: int,
    output: int,
    count: int,
    threads: int,
    weights: str,
    vocab: int,
) -> list[tuple[float, float]]:
    """Return (stack, engine alone) in tokens/s while all streams decode, `count` pairs in turn."""
    tokens = streams * (prompt + output + 32)
    found = []
    async with served_stack(folder, threads=threads, weights=weights, tokens=tokens) as stack:
        seconds = WARM_SECONDS
        for _ in range(count):
            start, alone = await _alone(folder, streams, prompt, output, threads, weights, vocab)
            seconds = max(WARM_SECONDS, 3 * start)
            report = await stack.load(
                clients="sse", model=folder.name, streams=streams, settle=0, seconds=seconds, chars=CHARS,
                arrivals=True, max_tokens=output, prompts=[letters(prompt, i) for i in range(streams)], ignore_eos=True,
                temperature=0.0,  # as the engine alone
            )  # fmt: skip
            found.append((stack_rate(report), alone))
    return found


def letters(count: int, number: int) -> str:
    """Return a prompt of `count` one-letter tokens; prompts of other numbers begin differently."""
    return "".join(
        chr(ord("A") + (number // 26 ** (i % 3) + i * number) % 26) for i in range(count)
    )


def stack_rate(report: Report) -> float:
    """Return tokens/s from the start of the last stream until the end of the first one."""
    end = min(stream.times[-1] for stream in report.streams)
    start = min(stream.times[0] for stream in report.streams)
    tokens = 0
    for stream in report.streams:
        index = bisect_right(stream.times, end) - 1
        tokens += stream.counts[index] - stream.counts[0]
    return tokens / (end - start) if end > start else 0.0


async def _alone(
    folder: Path, streams: int, prompt: int, output: int, threads: int, weights: str, vocab: int
) -> tuple[float, float]:
    """Return the seconds of a run and its tokens/s, of the engine in a process without a network."""
    task: dict[str, Any] = {
        "driver": "motet", "format": weights, "folder": str(folder), "threads": threads, "concurrency": [streams],
        "prompt": prompt, "output": output, "prefill": prompt, "prefills": 1, "vocab": vocab, "device": "cpu",
        "options": {"decode_slowdown": 0},
    }  # fmt: skip
    argv = [sys.executable, "-m", "benchmarks.engine.worker", json.dumps(task)]
    env = environment(OMP_NUM_THREADS=str(threads))
    process = await asyncio.create_subprocess_exec(*argv, env=env, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"the engine's process ended with {process.returncode}")
    run = json.loads(out.splitlines()[-1])["runs"][0]
    return max(times[-1] for times in run["times"]) - run["start"], decode_rate(run["times"])
