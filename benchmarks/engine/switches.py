"""Measure the gain of every switch of the engine against its alternative, in interleaved pairs.

`python benchmarks/run.py switches --help`. Two engines that differ in one setting are loaded side by
side and serve the same jobs, step by step in turn; where steps of one run during those of the other
(`overlap`), run by run. The table goes to standard output, the numbers to `results/switches.json`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.checkpoint import CHECKPOINT, add_checkpoint
from benchmarks.engine.replay import IN_TURN, Job, Replay, Served, rate, run_in_turn
from benchmarks.serving.bench import QUICK, Bench, Plan
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import median_interval, table
from benchmarks.support.paths import RESULTS_FOLDER
from motet_llm.engine.engine import Engine
from motet_shared.quantiles import quantile

RESULTS = RESULTS_FOLDER / "switches.json"
Jobs = Callable[[Bench], list[Job]]


# ------------------------------------------------------------------------------------------------------------ workloads
def one(bench: Bench) -> list[Job]:
    """Return one stream."""
    return [Job(0.0, bench.tokens(bench.plan.prompt), bench.plan.output)]


def eight(bench: Bench) -> list[Job]:
    """Return eight streams at a time."""
    return [job for _ in range(8) for job in one(bench)]


def shared(bench: Bench) -> list[Job]:
    """Return eight requests with a shared long prefix, one after the other."""
    prefix = bench.tokens(bench.plan.long_prompt)
    return [Job(0.01 * i, prefix + bench.tokens(20), 8) for i in range(8)]


def long_prompt(bench: Bench) -> list[Job]:
    """Return a long prompt that arrives while four streams run."""
    streams = [Job(0.0, bench.tokens(bench.plan.prompt), bench.plan.output * 2) for _ in range(4)]
    return [*streams, Job(0.3, bench.tokens(bench.plan.long_prompt), 2)]


def one_and_long(bench: Bench) -> list[Job]:
    """Return a long prompt that arrives while one stream runs."""
    stream = Job(0.0, bench.tokens(bench.plan.prompt), bench.plan.output * 2)
    return [stream, Job(0.3, bench.tokens(bench.plan.long_prompt), 2)]


def eight_and_long(bench: Bench) -> list[Job]:
    """Return a long prompt that arrives while eight streams run."""
    prompt, output = bench.plan.prompt, bench.plan.output * 2
    streams = [Job(0.0, bench.tokens(prompt), output) for _ in range(8)]
    return [*streams, Job(0.6, bench.tokens(bench.plan.long_prompt), 2)]


def returning(bench: Bench) -> list[Job]:
    """Return long prompts that come again after others have evicted their blocks."""
    prompts = [bench.tokens(bench.plan.long_prompt) for _ in range(3)]
    return [Job(1e-6 * i, prompt, 2) for i, prompt in enumerate([*prompts, *prompts])]


# -------------------------------------------------------------------------------------------------------------- figures
def smoothness(served: Sequence[Served]) -> float:
    """Return 1 / p99 inter-token latency of the streams."""
    return 1 / quantile((gap for s in served[:-1] for gap in s.gaps), 0.99)


def promptness(served: Sequence[Served]) -> float:
    """Return 1 / TTFT of the long prompt."""
    return 1 / served[-1].ttft


@dataclass(frozen=True)
class Switch:
    """Define a setting with its alternative, and a figure of merit, of which more is better."""

    name: str
    on: dict[str, Any]
    off: dict[str, Any]
    jobs: Jobs
    figure: Callable[[Sequence[Served]], float] = rate


def switches(plan: Plan) -> list[Switch]:
    tight = {"num_blocks": -(-(plan.long_prompt + 40) // 16) + 2, "max_running": 1}
    formats = [
        Switch(f"weights={w} against float32", {"weights": w}, {"weights": "float32"}, jobs)
        for w in ("bfloat16", "int8", "int4")
        for jobs in (one, eight)
    ]
    graphs = [
        Switch("cuda_graphs", {"cuda_graphs": True}, {"cuda_graphs": False}, jobs)
        for jobs in (one, eight)
    ]
    return [
        *formats,
        *(graphs if plan.device != "cpu" else []),  # a CPU replays tapes
        Switch(
            "kv_dtype=bfloat16 against float32",
            {"kv_dtype": "bfloat16"},
            {"kv_dtype": "float32"},
            eight,
        ),
        Switch("overlap", {"overlap": True}, {"overlap": False}, eight),
        *(
            Switch("deterministic", {"deterministic": True}, {"deterministic": False}, jobs)
            for jobs in (one, eight)
        ),
        Switch("prefix_cache, shared prompts", {}, {"prefix_cache": False}, shared),
        Switch("prefix_cache, nothing shared", {}, {"prefix_cache": False}, eight),
        Switch(
            "host_cache=1GiB, prompts that return",
            {**tight, "host_cache": 1 << 30},
            tight,
            returning,
        ),
        Switch(
            "disk_cache=1GiB, prompts that return",
            {**tight, "disk_cache": 1 << 30},
            tight,
            returning,
        ),
        Switch(
            "decode_slowdown=1.8 against 0, 1/p99 ITL",
            {},
            {"decode_slowdown": 0.0},
            long_prompt,
            smoothness,
        ),
        Switch(
            "decode_slowdown=1.8 against 0, 1/TTFT",
            {},
            {"decode_slowdown": 0.0},
            long_prompt,
            promptness,
        ),
        *(
            Switch(
                f"latency_goal by default against 0, {what}",
                {},
                {"latency_goal": 0.0},
                jobs,
                figure,
            )
            for jobs in (one_and_long, eight_and_long)
            for what, figure in (("1/TTFT", promptness), ("1/p99 ITL", smoothness))
        ),
        Switch("continuous against static batching", {}, {"static_batching": True}, staggered),
        Switch(
            "paged against contiguous KV",
            {"num_blocks": 96},
            {"num_blocks": 96, "contiguous_kv": True},
            roomy,
        ),
    ]


def staggered(bench: Bench) -> list[Job]:
    """Return requests of different lengths that arrive one by one."""
    plan = bench.plan
    return [
        Job(0.02 * i, bench.tokens(plan.prompt), 4 + (plan.output * (i % 4)) // 3)
        for i in range(12)
    ]


def roomy(bench: Bench) -> list[Job]:
    """Return requests with short replies but large max_tokens, for a small pool."""
    plan = bench.plan
    return [
        Job(0.0, bench.tokens(plan.prompt), plan.output // 2, limit=plan.output * 8)
        for _ in range(12)
    ]


@dataclass(frozen=True)
class Finding:
    name: str
    jobs: str
    gains: list[float]  # figure with it over figure without it, per pair
    megabytes: tuple[float, float]

    def cells(self) -> list[str]:
        low, high = median_interval(self.gains)
        with_it, without = self.megabytes
        gain = f"{statistics.median(self.gains):.2f} ({low:.2f}–{high:.2f})"
        return [self.name, self.jobs, gain, f"{with_it:,.0f} / {without:,.0f}"]


def measure(switch: Switch, bench: Bench, pairs: int) -> Finding:
    steps = not switch.on.keys() & IN_TURN.keys()
    both = IN_TURN if steps else {}
    engines = bench.pair({**both, **switch.on}, {**both, **switch.off})
    gains = []
    for pair in range(pairs):
        jobs = switch.jobs(bench)
        replays = Replay(engines[0], jobs), Replay(engines[1], jobs)
        served = run_in_turn(*replays) if steps else whole_runs(*replays, first=pair % 2)
        gains.append(switch.figure(served[0]) / switch.figure(served[1]))
    megabytes = tuple(_megabytes(engine) for engine in engines)
    for engine in engines:
        engine.close()
    return Finding(
        switch.name, switch.jobs.__name__.replace("_", " "), gains, (megabytes[0], megabytes[1])
    )


def whole_runs(one: Replay, other: Replay, *, first: int) -> tuple[list[Served], list[Served]]:
    """Run one after the other, the one with the number `first` before."""
    replays = (one, other)
    served = {which: replays[which].run() for which in (first, 1 - first)}
    return served[0], served[1]


def _megabytes(engine: Engine) -> float:
    """Return the megabytes of weights and KV cache."""
    stats = engine.stats()
    return (stats["weight_bytes"] + stats["kv_bytes"]) / 1e6


def run(plan: Plan, pairs: int, wanted: str, cache: Path, output: Path) -> list[Finding]:
    """Measure, print the table, and write the JSON file."""
    before = conditions()
    torch.set_num_threads(plan.threads or torch.get_num_threads())
    bench = Bench(plan, cache)
    findings = []
    for switch in switches(plan):
        if wanted in switch.name:
            findings.append(measure(switch, bench, pairs))
            print(f"  {' · '.join(findings[-1].cells())}", flush=True)
    print(f"\n{load_line(before)}")
    print(
        f"Random weights of the shape {plan.shape!r}; gains over {pairs} pairs, median and 95 % interval.\n"
    )
    print(table(["switch", "load", "gain", "MB"], [finding.cells() for finding in findings]))
    write(output, before, plan, [asdict(finding) for finding in findings])
    return findings


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(
        "What every switch of the engine costs and gains.",
        "a tiny model and one pair",
        RESULTS,
        prog="switches",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="switches whose name contains TEXT (default: all)",
    )
    parser.add_argument(
        "--pairs", type=int, default=8, help="interleaved pairs of runs per switch (default: 8)"
    )
    parser.add_argument("--device", help="cpu, or cuda, with a row for cuda_graphs (default: cpu)")
    add_checkpoint(parser, "middle")
    args = parser.parse_args(argv)
    plan = planned(args, Plan(), QUICK, (*CHECKPOINT, "device"))
    run(plan, 1 if args.quick else args.pairs, args.only, args.cache, args.file)


if __name__ == "__main__":
    main()
