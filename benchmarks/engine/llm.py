"""Compare our engine with transformers, llama.cpp and vLLM: the same weights, threads and prompts.

`python benchmarks/run.py llm --help`. The tables go to standard output, the numbers to
`results/llm.json`.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.checkpoint import SHAPES, random_checkpoint
from benchmarks.engine.figures import Figures, ratio, targets
from benchmarks.engine.peers import Peer, absent, measure, peers
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.cache import cache_folder
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER
from motet_cli.planning.this_cpu import read_bandwidth
from motet_kernels.runtime import native
from motet_kernels.runtime.build import multiplies_bfloat16
from motet_models.model_config import model_shape, read_config
from motet_models.roofline import Processor, decode_bound

WORKER_FIELDS = (
    "concurrency",
    "prompt",
    "output",
    "prefill",
    "prefills",
    "threads",
    "device",
)  # of a plan, to each engine
RESULTS = RESULTS_FOLDER / "llm.json"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define how much is measured.

    engines: prefixes of engine names; empty: all.
    """

    shape: str = "qwen3-0.6b"
    concurrency: tuple[int, ...] = (1, 8, 32)
    prompt: int = 128
    output: int = 64
    prefill: int = 512
    prefills: int = 3
    rounds: int = 3
    threads: int = 0
    engines: tuple[str, ...] = ()
    dtype: str = "auto"
    device: str = "cpu"


QUICK = Plan(shape="tiny", concurrency=(1, 2), prompt=8, output=6, prefill=16, prefills=1, rounds=1)


@dataclass
class Findings:
    figures: dict[str, Figures] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # by engine: why
    bandwidth: float = 0.0  # bytes/s, the best reading of the run


# ------------------------------------------------------------------------------------------------------------ measuring
def run_all(plan: Plan, cache: Path) -> Findings:
    """Run every engine once per round, one after the other, each in a process of its own."""
    findings = Findings()
    folder = random_checkpoint(plan.shape, cache)
    every = peers(transformers_dtype(plan.dtype, plan.device))
    chosen = [peer for peer in every if peer.name.startswith(plan.engines or ("",))]
    findings.missing = {
        peer.name: reason for peer in chosen if (reason := absent(peer, plan.device))
    }
    settings: dict[str, Any] = {}
    for _ in range(plan.rounds):
        findings.bandwidth = max(findings.bandwidth, _bandwidth(plan))
        for peer in chosen:
            if peer.name not in findings.missing:
                _measure(peer, plan, folder, findings, settings)
    _note_rooflines(chosen, plan, folder, findings)
    return findings


def _bandwidth(plan: Plan) -> float:
    """Return bytes/s that the threads read, or of a copy on a GPU."""
    if plan.device == "cpu":
        return read_bandwidth(plan.threads)
    from benchmarks.kernels.gpu_kernels import measure_machine

    return measure_machine(torch.device(plan.device), 0.2, quick=False).bandwidth


def _measure(
    peer: Peer, plan: Plan, folder: Path, findings: Findings, settings: dict[str, Any]
) -> None:
    task = {
        "folder": str(folder),
        "vocab": SHAPES[plan.shape]["vocab_size"],
        "settings": settings.get(peer.name),
        **{name: getattr(plan, name) for name in WORKER_FIELDS},
    }
    print(f"  {peer.name} ...", flush=True)
    try:
        result = measure(peer, task, plan.threads)
    except RuntimeError as error:
        findings.missing[peer.name] = str(error)
        findings.figures.pop(peer.name, None)
        return
    settings[peer.name] = result.get("settings")
    findings.figures.setdefault(peer.name, Figures(peer.name)).take(result, plan.prefill)


def _note_rooflines(chosen: Sequence[Peer], plan: Plan, folder: Path, findings: Findings) -> None:
    """Set the tokens/s that the bandwidth allows, with the cache of a run's middle."""
    shape, context = model_shape(read_config(folder)), plan.prompt + plan.output // 2
    memory = Processor(name="memory", memory=0, bandwidth=findings.bandwidth, bf16=1e30, int8=1e30)
    for peer in chosen:
        if (figures := findings.figures.get(peer.name)) is not None:
            for count in figures.decode:
                bound = decode_bound(
                    shape, memory, peer.format, batch=count, context=context, kv=peer.kv
                )
                figures.roofline[count] = bound.tokens_per_second


def transformers_dtype(given: str, device: str = "cpu") -> str:
    """Return transformers' dtype: bfloat16 if `MOTET_NATIVE` or the CPU supports it, else float32."""
    if given != "auto" or device != "cpu":
        return "bfloat16" if given == "auto" else given
    return "bfloat16" if multiplies_bfloat16(native.preferred()) else "float32"


# ------------------------------------------------------------------------------------------------------------- telling
def report(findings: Findings, plan: Plan) -> str:
    figures = list(findings.figures.values())
    parts = [
        f"{plan.shape}, prompts of {plan.prompt}, outputs of {plan.output}, {_place(plan)}, "
        f"median of {plan.rounds}; memory reads at {findings.bandwidth / 1e9:.1f} GB/s.",
        "Decode, tokens/s while all sequences run (share of what the bandwidth allows):",
        _decode_table(figures, plan),
        "Whole runs, output tokens/s with prefill:",
        _whole_table(figures, plan),
        "Ours as a multiple of each peer (decode; prefill):",
        _ratio_table(findings.figures, plan),
        targets_table(targets(findings.figures)),
    ]
    notes = [f"* {f.name}: {f.note}" for f in figures if f.note]
    notes += [f"* {name} is absent: {reason}" for name, reason in findings.missing.items()]
    return "\n\n".join([*parts, "\n".join(notes)])


def _place(plan: Plan) -> str:
    return (
        f"{plan.threads} threads"
        if plan.device == "cpu"
        else torch.cuda.get_device_name(plan.device)
    )


def _decode_table(figures: Sequence[Figures], plan: Plan) -> str:
    header = [
        "engine",
        "first tokens as ours",
        *(f"c={count}" for count in plan.concurrency),
        f"prefill {plan.prefill}",
    ]
    rows = []
    for f in figures:
        cells = []
        for count in plan.concurrency:
            rate = statistics.median(f.decode[count])
            cells.append(f"{rate:,.1f} ({rate / f.roofline[count]:.0%})")
        rows.append(
            [
                f.name,
                f"{f.agreement(figures[0]):.0%}",
                *cells,
                f"{statistics.median(f.prefill):,.0f}",
            ]
        )
    return table(header, rows)


def _whole_table(figures: Sequence[Figures], plan: Plan) -> str:
    header = ["engine", "", *(f"c={count}" for count in plan.concurrency)]
    rows = [
        [f.name, "", *(f"{statistics.median(f.whole[c]):,.1f}" for c in plan.concurrency)]
        for f in figures
    ]
    return table(header, rows)


def _ratio_table(figures: dict[str, Figures], plan: Plan) -> str:
    header = ["ours", "peer", *(f"c={count}" for count in plan.concurrency), "prefill"]
    ours = [f for f in figures.values() if f.name.startswith("motet")]
    rows = [
        [
            mine.name,
            peer.name,
            *(f"{ratio(mine.decode[count], peer.decode[count]):.2f}" for count in plan.concurrency),
            f"{ratio(mine.prefill, peer.prefill):.2f}",
        ]
        for mine in ours
        for peer in figures.values()
        if peer not in ours
    ]
    return table(header, rows)


def run(plan: Plan, cache: Path, output: Path) -> Findings:
    """Measure, print the tables, and write the JSON file."""
    before = conditions()
    plan = replace(plan, threads=plan.threads or len(os.sched_getaffinity(0)))
    findings = run_all(plan, cache)
    print(f"{load_line(before)}\n")
    print(report(findings, plan), flush=True)
    write(output, before, plan, findings, targets(findings.figures))
    return findings


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(
        "Our engine beside transformers, llama.cpp and vLLM.",
        "a tiny model and short runs",
        RESULTS,
        prog="llm",
    )
    parser.add_argument(
        "--rounds", type=int, help="runs of every engine, whose medians are reported (default: 3)"
    )
    parser.add_argument("--threads", type=int, help="threads of every engine (default: all cores)")
    parser.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        help="numbers of concurrent sequences (default: 1 8 32)",
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        metavar="NAME",
        help='prefixes of engine names, such as "motet int4" (default: all)',
    )
    parser.add_argument(
        "--shape",
        choices=sorted(SHAPES),
        help="shape of the random checkpoint (default: qwen3-0.6b)",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        help="dtype of transformers (default: the faster one here)",
    )
    parser.add_argument(
        "--device", help="device, such as cuda:1, with a suitable --shape (default: cpu)"
    )
    parser.add_argument(
        "--cache", type=Path, help="folder for checkpoints, 3.4 GB (bench in MOTET_CACHE)"
    )
    args = parser.parse_args(argv)
    if (args.device or "cpu") != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch sees no GPU here")
    run(planned(args, Plan(), QUICK), args.cache or cache_folder(), args.file)


if __name__ == "__main__":
    main()
