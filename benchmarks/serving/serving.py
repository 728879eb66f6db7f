"""Measure our engine under load: prefix hits, chunked prefill, goodput, costs of cache and stack.

`python benchmarks/run.py serving --help`. The tables go to standard output, the numbers to
`results/serving.json`.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.checkpoint import SHAPES
from benchmarks.engine.replay import Job, Replay, Served
from benchmarks.serving import served_stack
from benchmarks.serving.bench import QUICK, Bench, Findings, Plan
from benchmarks.serving.goodput import sustained
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.cache import cache_folder
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, median_interval, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER
from motet_shared.quantiles import quantile

RESULTS = RESULTS_FOLDER / "serving.json"


# ----------------------------------------------------------------------------------------------------------- prefix hit
def prefix_hit(bench: Bench) -> None:
    """Measure the TTFT of a long new prompt, and of the next one with the same prefix."""
    engine = bench.engine()
    misses: list[float] = []
    hits: list[float] = []
    for _ in range(bench.plan.repeats):
        shared = bench.tokens(bench.plan.long_prompt)
        for ttfts in (misses, hits):
            (served,) = Replay(engine, [Job(0.0, shared + bench.tokens(20), 2)]).run()
            ttfts.append(served.ttft)
    engine.close()
    saved = 1 - statistics.median(hit / miss for hit, miss in zip(hits, misses, strict=True))
    miss, hit = (statistics.median(ttfts) * 1e3 for ttfts in (misses, hits))
    bench.report(
        f"TTFT of {bench.plan.long_prompt} tokens, miss and hit", f"{miss:.1f} ms, {hit:.1f} ms"
    )
    bench.findings.numbers["prefix_hit"] = {"miss": misses, "hit": hits}
    bench.findings.targets.append(
        Target("TTFT saved by a prefix hit", saved * 100, 80, "%", most=False)
    )


# ------------------------------------------------------------------------------------------------------ chunked prefill
def chunked_prefill(bench: Bench) -> None:
    """Measure the p99 ITL of running streams while long prompts arrive, and without them."""
    plan, engine = bench.plan, bench.engine()
    undisturbed, disturbed = [], []
    for _ in range(plan.repeats):
        alone = Replay(engine, _running(bench)).run()
        begin, end = max(s.times[0] for s in alone), min(s.times[-1] for s in alone)
        undisturbed.append(quantile(_gaps(alone, [(begin, end)]), 0.99))
        # One long prompt after the other, all while the streams run.
        interval = (end - begin) / (plan.arrivals + 1)
        long_prompts = [
            Job(begin + interval * (i + 0.5), bench.tokens(plan.long_prompt), 2)
            for i in range(plan.arrivals)
        ]
        served = Replay(engine, [*_running(bench), *long_prompts]).run()
        streams, prompts = served[: plan.streams], served[plan.streams :]
        disturbed.append(
            quantile(_gaps(streams, [(s.job.arrival, s.times[0]) for s in prompts]), 0.99)
        )
    engine.close()
    p99 = f"{statistics.median(undisturbed) * 1e3:.1f} ms, {statistics.median(disturbed) * 1e3:.1f} ms"
    bench.report(
        f"p99 ITL of {plan.streams} streams, undisturbed and while {plan.long_prompt}-token prompts arrive",
        p99,
    )
    bench.findings.numbers["chunked_prefill"] = {"undisturbed": undisturbed, "disturbed": disturbed}
    ratio = statistics.median(b / a for a, b in zip(undisturbed, disturbed, strict=True))
    bench.findings.targets.append(Target("p99 ITL while long prompts arrive", ratio, 2, "times"))


def _running(bench: Bench) -> list[Job]:
    plan = bench.plan
    return [Job(0.0, bench.tokens(plan.prompt), plan.output * 4) for _ in range(plan.streams)]


def _gaps(streams: Sequence[Served], spans: Sequence[tuple[float, float]]) -> list[float]:
    """Return the inter-token latencies that overlap one of the spans of time."""
    gaps = [(gap, at) for s in streams for gap, at in zip(s.gaps, s.times[1:], strict=True)]
    return [gap for gap, at in gaps if any(at > begin and at - gap < end for begin, end in spans)]


# -------------------------------------------------------------------------------------------------------------- goodput
def goodput(bench: Bench) -> None:
    """Measure the highest sustained rate, and that of the engine with its features disabled."""
    plan = bench.plan
    trace, blocks = replace(plan.trace, vocab=bench.vocab), plan.pool // 16
    variants: dict[str, dict[str, Any]] = {
        "default": {},
        f"latency_goal={plan.latency_goal:g}": {"latency_goal": plan.latency_goal},
        "static batching, contiguous KV, no prefix cache": {
            "static_batching": True,
            "contiguous_kv": True,
            "prefix_cache": False,
        },
    }
    found = {}
    for name, changes in variants.items():
        engine = bench.engine(num_blocks=blocks, **changes)
        found[name] = sustained(
            engine, trace, plan.limits, first=plan.first_rate, probes=plan.probes
        )
        engine.close()
        bench.report(
            f"goodput, {name}", f"{found[name].good:.2f} of {found[name].rate:.2f} requests/s"
        )
    *full, ablated = found.values()
    bench.findings.numbers["goodput"] = {name: asdict(value) for name, value in found.items()}
    if ablated.good:
        best = max(one.good for one in full) / ablated.good
        bench.findings.targets.append(Target("goodput / ablation", best, 3.3, "times", most=False))


# -------------------------------------------------------------------------------------------------- prefix cache's cost
def prefix_cost(bench: Bench) -> None:
    """Measure the cost of a prefix cache without hits, in interleaved pairs with and without it.

    With it every prompt takes blocks that hold nothing, as long as there are some: until all were
    used once, the kernel has to provide their memory. Those pairs are reported for themselves.
    """
    plan = bench.plan
    engines = bench.pair({"prefix_cache": True}, {"prefix_cache": False})
    pool = engines[0].pool
    first = -(-pool.num_free // (plan.batch * pool.blocks_for(plan.prompt + plan.output)))
    costs = []
    for pair in range(first + plan.pairs):
        jobs = [Job(0.0, bench.tokens(plan.prompt), plan.output) for _ in range(plan.batch)]
        seconds = [0.0, 0.0]
        for which in (0, 1) if pair % 2 else (1, 0):
            served = Replay(engines[which], jobs).run()
            seconds[which] = max(s.times[-1] for s in served)
        costs.append((seconds[0] / seconds[1] - 1) * 100)
    for engine in engines:
        engine.close()
    new, used = costs[:first], costs[first:]
    for when, some in ((", blocks used for the first time", new), ("", used)):
        low, high = median_interval(some)
        bench.report(
            f"prefix cache without a hit{when}",
            f"{statistics.median(some):+.2f} % (95 %: {low:+.2f} to {high:+.2f})",
        )
    bench.findings.numbers |= {"prefix_cost": used, "prefix_cost_of_first_use": new}
    # A limit this small is missed only if the whole interval lies beyond it.
    bench.findings.targets.append(
        Target("prefix cache without a hit (low end of the interval)", low, 1, "%")
    )


# ----------------------------------------------------------------------------------------------------------- full stack
def full_stack(bench: Bench) -> None:
    """Measure tokens/s at the clients of the stack and of the engine alone, in interleaved pairs."""
    plan = bench.plan
    pairs = asyncio.run(
        served_stack.pairs(
            bench.folder,
            streams=plan.stack_streams,
            prompt=plan.prompt,
            output=plan.stack_output,
            count=plan.stack_pairs,
            threads=plan.threads,
            weights=plan.weights,
            vocab=bench.vocab,
        )
    )
    stack, alone = (statistics.median(rates) for rates in zip(*pairs, strict=True))
    bench.report(
        f"{plan.stack_streams} streams, full stack and engine alone",
        f"{stack:,.0f}, {alone:,.0f} tokens/s",
    )
    share = statistics.median(ours / engine for ours, engine in pairs) * 100
    bench.findings.numbers["full_stack"] = pairs
    bench.findings.targets.append(Target("full stack / engine alone", share, 92, "%", most=False))


EXPERIMENTS: dict[str, Callable[[Bench], None]] = {
    "prefix-hit": prefix_hit,
    "chunked-prefill": chunked_prefill,
    "goodput": goodput,
    "prefix-cost": prefix_cost,
    "stack": full_stack,
}


def run(plan: Plan, names: Sequence[str], cache: Path, output: Path) -> Findings:
    """Measure, print the tables, and write the JSON file."""
    before = conditions()
    plan = replace(plan, threads=plan.threads or len(os.sched_getaffinity(0)))
    torch.set_num_threads(plan.threads)
    bench = Bench(plan, cache)
    for name in names:
        EXPERIMENTS[name](bench)
    print(f"\n{load_line(before)}")
    print(
        f"Random weights of the shape {plan.shape!r}, {plan.weights} weights, {plan.threads} threads.\n"
    )
    print(
        table(["experiment", "result"], bench.findings.rows),
        targets_table(bench.findings.targets),
        sep="\n\n",
    )
    write(output, before, plan, bench.findings.numbers, bench.findings.targets)
    return bench.findings


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(
        "What our engine does under load.", "a tiny model and short runs", RESULTS, prog="serving"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(EXPERIMENTS),
        default=list(EXPERIMENTS),
        help="those to run (default: all)",
    )
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), help="shape of the random checkpoint (default: middle)"
    )
    parser.add_argument(
        "--weights", help="format of the weights, as the engine's setting (default: auto)"
    )
    parser.add_argument("--threads", type=int, help="threads that compute (default: all cores)")
    parser.add_argument(
        "--first-rate",
        type=float,
        help="requests/s at which the search for goodput begins (default: 2)",
    )
    parser.add_argument(
        "--pool", type=int, help="tokens of KV cache in the goodput experiment (default: 16384)"
    )
    parser.add_argument("--cache", type=Path, help="folder for checkpoints (bench in MOTET_CACHE)")
    args = parser.parse_args(argv)
    run(planned(args, Plan(), QUICK), args.only, args.cache or cache_folder(), args.file)


if __name__ == "__main__":
    main()
