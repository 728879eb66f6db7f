"""Compare a group of ranks, one core each, with one process that has all cores.

`python benchmarks/run.py ranks --help`. All engines are loaded once, and run in turn, the others
stopped: one process, tensor parallelism over shared memory and over gloo, and vLLM's, if it is
there. The tables go to standard output, the numbers to `results/ranks.json`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine.checkpoint import SHAPES, add_checkpoint, random_checkpoint
from benchmarks.engine.figures import decode_rate
from benchmarks.engine.peers import VLLM_PYTHON
from benchmarks.engine.turns import Turns
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, median_interval, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER, ROOT
from benchmarks.support.workers import has_modules

RESULTS = RESULTS_FOLDER / "ranks.json"
ALONE, SHARED, GLOO = "one process", "ranks, shared memory", "ranks, gloo"
VLLM_ALONE, VLLM_RANKS = "vllm, one process", "vllm, ranks"
# What is divided by what, and the least that is wanted.
RATIOS = ((SHARED, ALONE, 0.9), (GLOO, ALONE, 0.0), (SHARED, GLOO, 0.0))
PEER_RATIOS = ((VLLM_RANKS, VLLM_ALONE, 0.0), (SHARED, VLLM_RANKS, 0.0))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define how much is measured; lengths are in tokens. engines: those whose names contain one."""

    shape: str = "qwen3-0.6b"
    weights: str = "bfloat16"
    concurrency: tuple[int, ...] = (1, 8)
    prompt: int = 128
    output: int = 64
    prefill: int = 512
    rounds: int = 20
    ranks: int = 2
    threads: int = 0
    engines: tuple[str, ...] = ()


QUICK = Plan(shape="tiny", concurrency=(1, 2), prompt=8, output=6, prefill=16, rounds=1)


@dataclass
class Findings:
    """Hold tokens/s by engine and load, a number for each round; missing: engines, and why."""

    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def ratios(self, ours: str, theirs: str, load: str) -> list[float]:
        """Return the ratios of two engines' rates, by round."""
        pairs = zip(self.rates[ours][load], self.rates[theirs][load], strict=True)
        return [one / other for one, other in pairs]


def engines(plan: Plan) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Return by name each engine's interpreter, worker module and task."""
    ours = sys.executable
    options: dict[str, Any] = {"decode_slowdown": 0}
    group = options | {"tensor_parallel": plan.ranks}
    task: dict[str, Any] = {"format": plan.weights}
    found: dict[str, tuple[str, str, dict[str, Any]]] = {
        ALONE: (ours, "worker", task | {"options": options}),
        SHARED: (ours, "worker", task | {"options": group}),
        GLOO: (ours, "worker", task | {"options": group | {"rank_memory": False}}),
    }
    if python := os.environ.get(VLLM_PYTHON):
        found[VLLM_ALONE] = (python, "vllm_worker", task)
        found[VLLM_RANKS] = (python, "vllm_worker", task | {"ranks": plan.ranks})
    chosen = plan.engines or ("",)
    return {name: how for name, how in found.items() if any(part in name for part in chosen)}


def start(plan: Plan, folder: Path, how: tuple[str, str, dict[str, Any]]) -> Turns:
    """Start an engine. Raises RuntimeError."""
    python, module, task = how
    given = {
        "folder": str(folder),
        "vocab": SHAPES[plan.shape]["vocab_size"],
        "concurrency": plan.concurrency,
        "prompt": plan.prompt,
        "output": plan.output,
        "prefill": plan.prefill,
        "threads": plan.threads or len(os.sched_getaffinity(0)),
        "device": "cpu",
        **task,
    }
    paths = [str(ROOT), *(filter(None, sys.path) if python == sys.executable else ())]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [python, "-m", f"benchmarks.engine.{module}", json.dumps(given), "turns"]
    return Turns(command, env)


def measure(plan: Plan, cache: Path) -> Findings:
    """Run all engines in turn, every load in every round."""
    findings, running = Findings(), dict[str, Turns]()
    folder = random_checkpoint(plan.shape, cache)
    if not has_modules(os.environ.get(VLLM_PYTHON) or sys.executable, "vllm"):
        findings.missing["vllm"] = f"it is not installed for {VLLM_PYTHON} (benchmarks/README.md)"
    try:
        for name, how in engines(plan).items():
            if name.startswith("vllm") and "vllm" in findings.missing:
                continue
            print(f"  {name} is loaded ...", flush=True)
            try:
                running[name] = start(plan, folder, how)
            except RuntimeError as error:
                findings.missing[name] = str(error)
        for number in range(-1, plan.rounds):  # the first one warms up
            _round(plan, running, number, findings)
    finally:
        for turns in running.values():
            turns.close()
    return findings


def _round(plan: Plan, running: dict[str, Turns], number: int, findings: Findings) -> None:
    names = list(running)
    first = number % max(1, len(names))
    for name in names[first:] + names[:first]:
        found = _rates(plan, running[name], number)
        if number < 0:
            continue
        for load, rate in found.items():
            findings.rates.setdefault(name, {}).setdefault(load, []).append(rate)
        cells = ", ".join(f"{load} {rate:,.1f}" for load, rate in found.items())
        print(f"  {number} {name}: {cells}", flush=True)


def _rates(plan: Plan, turns: Turns, number: int) -> dict[str, float]:
    """Return tokens/s of each load; every round has prompts of its own."""
    found = {}
    for count in plan.concurrency:
        run = turns.run(count=count, length=plan.prompt, number=number, output=plan.output)
        found[f"c={count}"] = decode_rate(run["times"])
    run = turns.run(count=1, length=plan.prefill, number=number, output=1)
    found[f"prefill {plan.prefill}"] = plan.prefill / (run["times"][0][0] - run["start"])
    return found


def ratio_rows(findings: Findings) -> list[list[str]]:
    """Return medians of the ratios with their 95 % intervals."""
    rows = []
    for ours, theirs, _ in (*RATIOS, *PEER_RATIOS):
        if ours in findings.rates and theirs in findings.rates:
            cells = []
            for load in findings.rates[ours]:
                pairs = findings.ratios(ours, theirs, load)
                low, high = median_interval(pairs)
                cells.append(f"{statistics.median(pairs):.2f} ({low:.2f}–{high:.2f})")
            rows.append([ours, theirs, *cells])
    return rows


def targets(findings: Findings) -> list[Target]:
    """Return the targets that this run can judge."""
    return [
        Target(
            f"{ours} / {theirs}, {load}",
            statistics.median(findings.ratios(ours, theirs, load)),
            least,
            "times",
            most=False,
        )
        for ours, theirs, least in RATIOS
        if least and ours in findings.rates and theirs in findings.rates
        for load in findings.rates[ours]
    ]


def report(findings: Findings, plan: Plan) -> str:
    loads = list(next(iter(findings.rates.values()), {}))
    medians = [
        [name, str(plan.rounds), *(f"{statistics.median(rates[load]):,.1f}" for load in loads)]
        for name, rates in findings.rates.items()
    ]
    parts = [
        f"{plan.shape}, {plan.weights}, {plan.ranks} ranks, prompts of {plan.prompt}, outputs of"
        f" {plan.output}, tokens/s, median of {plan.rounds} rounds:",
        table(["engine", "rounds", *loads], medians),
        "Ratios of rounds, median and 95 % interval:",
        table(["engine", "beside", *loads], ratio_rows(findings)),
        targets_table(targets(findings)),
        "\n".join(f"* {name} is absent: {reason}" for name, reason in findings.missing.items()),
    ]
    return "\n\n".join(filter(None, parts))


def run(plan: Plan, cache: Path, output: Path) -> Findings:
    """Measure, print the tables, and write the JSON file."""
    before = conditions()
    findings = measure(plan, cache)
    print(f"{load_line(before)}\n\n{report(findings, plan)}", flush=True)
    write(output, before, plan, findings, targets(findings))
    return findings


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(
        "Groups of ranks beside one process with the same cores.",
        "a tiny model and one round",
        RESULTS,
        prog="ranks",
    )
    add_checkpoint(parser, "qwen3-0.6b")
    parser.add_argument("--rounds", type=int, help="turns of every engine (default: 20)")
    parser.add_argument("--ranks", type=int, help="ranks of a group (default: 2)")
    parser.add_argument("--output-tokens", dest="output", type=int, help="of a run (default: 64)")
    parser.add_argument("--weights", help="format of matrices (default: bfloat16)")
    parser.add_argument("--concurrency", type=int, nargs="+", help="sequences (default: 1 8)")
    parser.add_argument(
        "--engines", nargs="+", metavar="TEXT", help="engines with such a name (default: all)"
    )
    args = parser.parse_args(argv)
    run(planned(args, Plan(), QUICK), args.cache, args.file)


if __name__ == "__main__":
    main()
