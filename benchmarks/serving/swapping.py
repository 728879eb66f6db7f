"""Measure models that are loaded on demand: cold first tokens, and residents beside loading.

`python benchmarks/run.py swapping --help`. A `motet up` with more models than fit. First, one after the
other, models that are not loaded are asked for while nothing else runs, twice: the first time their
weights are packed, the second time read as packed before. Their files are dropped from the page
cache before. Then requests arrive at random, for models by Zipf's law. The same arrivals for
models that fit are the baseline of the time between tokens. The numbers go to
`results/swapping.json`. It takes less than ten minutes, and 13 GB of disk in `--cache`; `--prepare` makes
the checkpoints beforehand.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import httpx

from benchmarks.engine.checkpoint import add_checkpoint, random_checkpoint
from benchmarks.stack.stack import STOP_SECONDS
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.cache import made
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER, ROOT
from motet_kernels.runtime.build import cache_folder as native_kernels
from motet_shared.quantiles import quantile
from motet_shared.testing import free_port

RESULTS = RESULTS_FOLDER / "swapping.json"
COLD_LIMIT, ITL_LIMIT = 1.3, 1.5  # times
START_SECONDS, REQUEST_SECONDS = 240.0, 300.0
_READ_BYTES = 1 << 23


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define how much is measured.

    models, loaded: models of the stack, and how many fit at a time. cold: models that are asked for
    alone. requests: of the trace, and of its baseline. rate: arrivals per second. exponent: of
    Zipf's law. prompt, output: tokens.
    """

    shape: str = "small"
    models: int = 20
    loaded: int = 4
    cold: int = 10
    requests: int = 70
    rate: float = 0.5
    exponent: float = 1.2
    prompt: int = 32
    output: int = 24


QUICK = Plan(shape="tiny", models=4, loaded=2, cold=2, requests=8, rate=2.0, output=8)


@dataclass
class Reply:
    """Hold a request: seconds to its first token, and between tokens; cold if it was loaded for it."""

    model: str
    first: float = 0.0
    between: list[float] = field(default_factory=list)
    cold: bool = False
    error: str = ""


@dataclass
class Findings:
    """Hold what was measured.

    disk: seconds to read each cold model's files. unpacked: the first request ever for it. cold,
    warm: a later request for it when it is not loaded, and the one after that.
    """

    unpacked: list[Reply] = field(default_factory=list)
    disk: list[float] = field(default_factory=list)
    cold: list[Reply] = field(default_factory=list)
    warm: list[Reply] = field(default_factory=list)
    baseline: list[Reply] = field(default_factory=list)
    trace: list[Reply] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------------------ the stack
def checkpoints(plan: Plan, cache: Path) -> dict[str, Path]:
    """Return a folder of its own for each model, so that no file is shared."""
    first = random_checkpoint(plan.shape, cache)
    names = [f"model-{number:02}" for number in range(plan.models)]
    return {
        name: made(cache / f"{first.name}-{name}", lambda folder: shutil.copytree(first, folder))
        for name in names
    }


@contextlib.asynccontextmanager
async def stack(plan: Plan, folders: dict[str, Path], caches: Path) -> AsyncIterator[str]:
    """Yield the URL of a `motet up` that loads these models on demand.

    caches: its MOTET_CACHE.
    """
    port = free_port()
    packages = [ROOT / part for part in ("shared", "services", "kernels", "pipelines", "cli")]
    paths = os.pathsep.join(map(str, packages))
    env = {**os.environ, "PYTHONPATH": paths, "MOTET_CACHE": str(caches)}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "motet.toml"
        config.write_text(stack_file(plan, folders, port))
        argv = [sys.executable, "-m", "motet_cli", "up", "--config", str(config)]
        log = (Path(folder) / "log").open("wb")
        process = await asyncio.create_subprocess_exec(*argv, env=env, stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            await _ready(url, process, plan.models)
            yield url
        except BaseException:
            print((Path(folder) / "log").read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 3 * STOP_SECONDS)
            if process.returncode is None:
                process.kill()
            log.close()


def stack_file(plan: Plan, folders: dict[str, Path], port: int) -> str:
    """Return motet.toml of the stack."""
    settings = ["asr", "tts", "speakers", "draw", "embed"]
    lines = ["[settings]", f"port = {port}", "vad = 0", "no_store = true"]
    lines += [f'{name} = "none"' for name in settings]
    lines += ["[on_demand]", f"max_loaded = {plan.loaded}", 'keep_alive = "forever"']
    for name, folder in folders.items():
        lines += [f"[models.{name}]", f'source = "{folder}"', 'load = "on demand"']
        lines += ["settings = { num_blocks = 512 }"]
    return "\n".join(lines) + "\n"


async def _ready(url: str, process: asyncio.subprocess.Process, count: int) -> None:
    async with httpx.AsyncClient(trust_env=False) as http, asyncio.timeout(START_SECONDS):
        while process.returncode is None:
            with contextlib.suppress(httpx.HTTPError):
                found = (await http.get(f"{url}/v1/models")).json().get("data", [])
                if len([model for model in found if "loading" in model]) == count:
                    return
            await asyncio.sleep(0.2)
    raise RuntimeError(f"motet up ended with {process.returncode}")


# ------------------------------------------------------------------------------------------------------------ measuring
def read_from_disk(folder: Path) -> float:
    """Return the seconds to read the weights, which are in no cache."""
    forget(folder)
    began = monotonic()
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.read(_READ_BYTES):
                pass
    return monotonic() - began


def forget(folder: Path) -> None:
    """Drop the files of a folder, if it exists, from the page cache; what is mapped stays."""
    for path in folder.glob("*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def ask(http: httpx.AsyncClient, plan: Plan, model: str, seed: int) -> Reply:
    """Send one request and time its tokens."""
    chance, reply, last = random.Random(seed), Reply(model), 0.0
    prompt = [300 + chance.randrange(150) for _ in range(plan.prompt)]
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": plan.output,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
    }
    began = monotonic()
    try:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                reply.cold = reply.cold or line.startswith(": loading")
                if line.startswith("data: {") and '"error"' in line:
                    reply.error = line
                if line.startswith("data: {") and '"choices":[{' in line.replace(" ", ""):
                    now = monotonic()
                    if last:
                        reply.between.append(now - last)
                    else:
                        reply.first = now - began
                    last = now
            if answer.status_code != 200 or not last:
                reply.error = reply.error or f"status {answer.status_code}"
    except httpx.HTTPError as error:
        reply.error = repr(error)
    return reply


async def measure_cold(
    http: httpx.AsyncClient, plan: Plan, folders: dict[str, Path], packed: Path, found: Findings
) -> None:
    """Ask for models one after the other; then again, each twice. packed: folder of packed weights."""
    names = list(folders)[: plan.cold]
    for number, name in enumerate(names):
        forget(folders[name])
        found.unpacked.append(await ask(http, plan, name, number))
    for number, name in enumerate(names):
        found.disk.append(read_from_disk(folders[name]))
        forget(folders[name])
        forget(packed)
        found.cold.append(await ask(http, plan, name, number))
        found.warm.append(await ask(http, plan, name, 1000 + number))


async def replay(http: httpx.AsyncClient, plan: Plan, names: Sequence[str]) -> list[Reply]:
    """Send requests at random times, for models by Zipf's law; each seed gives the same trace."""
    chance = random.Random(7)
    weights = [1 / (rank + 1) ** plan.exponent for rank in range(len(names))]
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number in range(plan.requests):
            (model,) = chance.choices(names, weights)
            tasks.append(group.create_task(ask(http, plan, model, number)))
            await asyncio.sleep(chance.expovariate(plan.rate))
    return [task.result() for task in tasks]


async def measure(plan: Plan, folders: dict[str, Path]) -> Findings:
    """Measure everything at one stack, whose packed weights are deleted afterwards."""
    found = Findings()
    with tempfile.TemporaryDirectory(dir=next(iter(folders.values())).parent) as caches:
        (Path(caches) / "kernels").symlink_to(native_kernels().parent)
        await _measure(plan, folders, Path(caches), found)
    return found


async def _measure(plan: Plan, folders: dict[str, Path], caches: Path, found: Findings) -> None:
    async with (
        stack(plan, folders, caches) as url,
        httpx.AsyncClient(base_url=url, timeout=REQUEST_SECONDS, trust_env=False) as http,
    ):
        print("  cold first tokens ...", flush=True)
        await measure_cold(http, plan, folders, caches / "packed", found)
        names = list(folders)
        for number, name in enumerate(names[: plan.loaded]):  # the baseline's models are resident
            await ask(http, plan, name, number)
        print("  requests for models that fit ...", flush=True)
        found.baseline = await replay(http, plan, names[: plan.loaded])
        print("  requests for all models ...", flush=True)
        found.trace = await replay(http, plan, names)


# -------------------------------------------------------------------------------------------------------------- telling
def gaps(replies: Sequence[Reply]) -> list[float]:
    """Return the seconds between tokens of replies whose model was there."""
    return [gap for reply in replies if not reply.cold for gap in reply.between]


def targets(found: Findings) -> list[Target]:
    """Return the limits and what was measured."""
    due = [disk + warm.first for disk, warm in zip(found.disk, found.warm, strict=True)]
    ratios = [cold.first / limit for cold, limit in zip(found.cold, due, strict=True)]
    before, beside = gaps(found.baseline), gaps(found.trace)
    every = [*found.unpacked, *found.cold, *found.warm, *found.baseline, *found.trace]
    errors = sum(reply.error != "" for reply in every)
    return [
        Target("cold first token / (disk + warm first token), p95", quantile(ratios, 0.95),
               COLD_LIMIT, "times"),
        Target("residents' time between tokens, p99, beside loading / without",
               quantile(beside, 0.99) / quantile(before, 0.99), ITL_LIMIT, "times"),
        Target("requests that failed", float(errors), 0.0, "requests"),
    ]  # fmt: skip


def report(found: Findings) -> str:
    """Return the table of percentiles, in seconds."""
    rows = []
    series = {
        "disk": found.disk,
        "first token, cold, packed for the first time": [reply.first for reply in found.unpacked],
        "first token, cold, alone": [reply.first for reply in found.cold],
        "first token, warm, alone": [reply.first for reply in found.warm],
        "first token, trace, cold": [r.first for r in found.trace if r.cold and not r.error],
        "first token, trace, resident": [
            r.first for r in found.trace if not r.cold and not r.error
        ],
        "between tokens, models that fit": gaps(found.baseline),
        "between tokens, trace, resident": gaps(found.trace),
    }
    for what, values in series.items():
        shares = [f"{quantile(values, q):.3f}" if values else "-" for q in (0.5, 0.95, 0.99)]
        rows.append([what, str(len(values)), *shares])
    return table(["seconds", "count", "p50", "p95", "p99"], rows)


def main() -> None:
    parser = parser_of(__doc__, "four tiny models, two of which fit", RESULTS)
    add_checkpoint(parser, Plan.shape)
    for name, kind in (
        ("models", int),
        ("loaded", int),
        ("cold", int),
        ("requests", int),
        ("rate", float),
    ):
        parser.add_argument(f"--{name}", type=kind, help=f"(default: {getattr(Plan, name)})")
    prepare = "only make the checkpoints in the cache, so that a quiet machine then only measures"
    parser.add_argument("--prepare", action="store_true", help=prepare)
    args = parser.parse_args()
    plan, before = planned(args, Plan(), QUICK), conditions()
    folders = checkpoints(plan, args.cache)
    if args.prepare:
        print(f"{len(folders)} checkpoints lie in {args.cache}")
        return
    found = asyncio.run(measure(plan, folders))
    print(report(found))
    print()
    print(targets_table(targets(found)))
    print(load_line(before))
    failed = {
        reply.error
        for reply in [*found.unpacked, *found.cold, *found.trace, *found.baseline]
        if reply.error
    }
    for error in sorted(failed):
        print(error)
    write(args.file, before, plan, found, targets(found))


if __name__ == "__main__":
    main()
