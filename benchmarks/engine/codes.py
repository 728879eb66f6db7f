"""Measure decoding with matrices in the codes of checkpoints, over our own int4 and int8.

`python benchmarks/run.py codes --help`. Two engines of one shape take steps in turn: one with our own
format (int4 beside codes of 4 bits and less, int8 beside all others), one with random codes in all
its matrices, head included. A share is the time of our own format's step over that of the codes: of
the faster quarter of all steps each, and the median over pairs of steps with its 95 % interval. The
table goes to standard output, the numbers to `results/codes.json`; docs/techniques.md describes the
formats.
`MOTET_NATIVE=avx2` measures another instruction set than the processor's best.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.checkpoint import CHECKPOINT, add_checkpoint
from benchmarks.engine.replay import blocks_for
from benchmarks.serving.bench import QUICK, Bench, Plan
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, median_interval, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER
from motet_kernels.linear.code_linear import CodeLinear
from motet_kernels.linear.group_weights import GroupWeights
from motet_kernels.linear.linear import Linear
from motet_kernels.linear.scales import Scales, SpanScales
from motet_kernels.runtime import native
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_shared.messages import Sampling

Clock = Callable[[], float]
RESULTS = RESULTS_FOLDER / "codes.json"
STREAMS = (1, 8)
PROMPT, SETTLE = 16, 8  # tokens, and steps before the first that is measured
LEAST = 0.9  # of our own format's speed
SCALE = 1 / 4096  # small enough that activations of a random model stay finite


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Define random weights of a format.

    own: our format that it is compared with. levels: number of different codes; those of 8 bits are
    around zero, but for shifted ones. group: inputs per scale; 0: all of them. span: groups that
    share a number; 0: none. table: see `GroupWeights.levels`.
    """

    name: str
    own: str = "int4"
    levels: int = 16
    group: int = 32
    span: int = 0
    dtype: torch.dtype = torch.float16
    shifted: bool = False
    table: str | None = None

    def weights(self, features: int, inputs: int) -> GroupWeights:
        """Return random weights `[features, inputs]`."""
        codes_NK = torch.randint(0, self.levels, (features, inputs), dtype=torch.uint8)
        if self.own == "int8":
            middle = 0 if self.shifted else self.levels // 2
            codes_NK = (codes_NK.to(torch.int16) - middle).to(torch.int8)
        group = self.group or -(-inputs // 32) * 32
        shift_NG = self._numbers(features, inputs, group) if self.shifted else None
        scale_NG = self._numbers(features, inputs, group)
        narrow = self.levels == 4
        return GroupWeights(codes_NK, scale_NG, shift_NG, group, None, self.table, narrow)

    def _numbers(self, features: int, inputs: int, group: int) -> Scales:
        groups = -(-inputs // group)
        if not self.span:
            return self._drawn(features, groups)
        fine_NG = torch.randint(1, 16, (features, groups), dtype=torch.int8)
        return SpanScales(fine_NG, self._drawn(features, -(-groups // self.span)), self.span)

    def _drawn(self, features: int, count: int) -> Tensor:
        return (torch.rand(features, count) * SCALE).to(self.dtype).float()


KINDS = (
    Kind(name="GPTQ, groups of 128", group=128),
    Kind(name="Q4_0"),
    Kind(name="Q4_1", shifted=True),
    Kind(name="Q4_K", span=8, shifted=True),
    Kind(name="MXFP4", dtype=torch.bfloat16, table="fp4"),
    Kind(name="Q3_K", levels=8, group=16, span=16),
    Kind(name="IQ4_NL", table="iq4"),
    Kind(name="Q2_K", levels=4, group=16, span=16, shifted=True),
    Kind(name="nf4", group=64, dtype=torch.float32, table="nf4"),
    Kind(name="int8, a scale per output", own="int8", levels=255, group=0, dtype=torch.float32),
    Kind(name="Q8_0", own="int8", levels=255),
    Kind(name="Q5_K", own="int8", levels=32, span=8, shifted=True),
    Kind(name="Q6_K", own="int8", levels=64, group=16, span=16),
)


@dataclass
class Found:
    """Hold seconds per step by number of streams, ours and theirs in pairs, and bytes of weights."""

    name: str
    own: dict[int, list[float]]
    codes: dict[int, list[float]]
    own_bytes: int
    codes_bytes: int

    def share(self, streams: int) -> float:
        """Return the share of the faster quarters."""
        return faster_quarter(self.own[streams]) / faster_quarter(self.codes[streams])

    def pairs(self, streams: int) -> list[float]:
        """Return the share of each pair of steps."""
        return [a / b for a, b in zip(self.own[streams], self.codes[streams], strict=True)]

    def cells(self) -> list[str]:
        cells = [self.name, f"{self.codes_bytes / self.own_bytes:.2f}"]
        for streams in self.own:
            pairs = self.pairs(streams)
            low, high = median_interval(pairs)
            median = f"{statistics.median(pairs):.2f}, {low:.2f} to {high:.2f}"
            cells.append(f"{self.share(streams):.2f} ({median})")
        return cells


def faster_quarter(seconds: Sequence[float]) -> float:
    """Return the mean of the fastest quarter."""
    return statistics.mean(sorted(seconds)[: max(1, len(seconds) // 4)])


def targets(findings: Sequence[Found]) -> list[Target]:
    """Return the target of each format at each number of sequences, by the faster quarters."""
    return [
        Target(
            f"{found.name}, {streams} sequences",
            found.share(streams),
            LEAST,
            "times",
            most=False,
        )
        for found in findings
        for streams in found.own
    ]


def recode(engine: Engine, kind: Kind) -> None:
    """Give all matrices of an engine that has taken no step random codes, where they are."""
    made: dict[tuple[int, int], GroupWeights] = {}
    for module in list(engine.runner.model.modules()):
        if type(module) is Linear:
            shape = module.out_features, module.in_features
            made[shape] = made.get(shape) or kind.weights(*shape)
            coded = CodeLinear(made[shape], module.bias_N)
            module.__class__ = CodeLinear
            module.__dict__ = coded.__dict__


def matrix_bytes(engine: Engine) -> int:
    """Return the memory of all packed matrices."""
    modules = engine.runner.model.modules()
    return sum(module.nbytes for module in modules if isinstance(module, Linear))


def engine_of(bench: Bench, kind: Kind, *, coded: bool) -> Engine:
    """Return an engine of our own format, or of random codes."""
    blocks = blocks_for(max(STREAMS), PROMPT + bench.plan.output + SETTLE)
    sizes = {"max_running": max(STREAMS), "num_blocks": blocks}
    settings: dict[str, Any] = {"threads": bench.plan.threads, "weights": kind.own, **sizes}
    if not coded:  # packed anew, so that both lie on huge pages
        settings["packed_cache"] = 0
    engine = Engine(EngineConfig(model=str(bench.folder), **settings))
    if coded:
        recode(engine, kind)
    return engine


def start(bench: Bench, engine: Engine, streams: int) -> None:
    """Begin as many replies, and take steps until all of them decode."""
    sampling = Sampling(max_tokens=bench.plan.output + SETTLE, temperature=0, ignore_eos=True)
    for number in range(streams):
        engine.add(str(number), bench.tokens(PROMPT), sampling)
    for _ in range(SETTLE):
        engine.step()


def stop(engine: Engine, streams: int) -> None:
    for number in range(streams):
        engine.cancel(str(number))
    while engine.has_work:
        engine.step()


def measure(bench: Bench, kind: Kind, own: Engine, steps: int, clock: Clock) -> Found:
    """Take pairs of steps, which go first in turn."""

    def timed(step: Callable[[], object]) -> float:
        began = clock()
        step()
        return clock() - began

    coded = engine_of(bench, kind, coded=True)
    found = Found(kind.name, {}, {}, matrix_bytes(own), matrix_bytes(coded))
    for streams in STREAMS:
        seconds: tuple[list[float], list[float]] = [], []
        for engine in (own, coded):
            start(bench, engine, streams)
        for number in range(steps):
            for which in (0, 1) if number % 2 else (1, 0):
                seconds[which].append(timed((own, coded)[which].step))
        for engine in (own, coded):
            stop(engine, streams)
        found.own[streams], found.codes[streams] = seconds
    coded.close()
    return found


def run(
    plan: Plan, steps: int, wanted: str, clock: Clock, cache: Path, output: Path
) -> list[Found]:
    """Measure all wanted formats, print the table, and write the JSON file."""
    before = conditions()
    torch.set_num_threads(plan.threads or torch.get_num_threads())
    torch.manual_seed(0)
    bench, findings = Bench(plan, cache), []
    for form in ("int4", "int8"):
        kinds = [kind for kind in KINDS if kind.own == form and wanted in kind.name]
        if not kinds:
            continue
        own = engine_of(bench, kinds[0], coded=False)
        for kind in kinds:
            findings.append(measure(bench, kind, own, steps, clock))
            print(f"  {' · '.join(findings[-1].cells())}", flush=True)
        own.close()
    print(f"\n{load_line(before)}, {native.status()['isa']}")
    print(f"Random codes in the shape {plan.shape!r}, {steps} steps each.\n")
    header = ["codes", "bytes", *(f"{streams} sequences" for streams in STREAMS)]
    print(table(header, [found.cells() for found in findings]))
    print(f"\n{targets_table(targets(findings))}")
    write(output, before, plan, findings, targets(findings))
    return findings


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(
        "What decoding with codes of checkpoints costs.", "a tiny model, four steps", RESULTS,
        prog="codes",
    )  # fmt: skip
    only = "formats whose name contains TEXT (default: all)"
    parser.add_argument("--only", default="", metavar="TEXT", help=only)
    cpu = "measure the process's CPU time, with --threads 1, where others use the machine"
    parser.add_argument("--cpu-time", action="store_true", help=cpu)
    parser.add_argument("--steps", type=int, default=80, help="of each engine (default: 80)")
    add_checkpoint(parser, "small")
    args = parser.parse_args(argv)
    steps = 4 if args.quick else args.steps
    plan = planned(args, Plan(shape="small", output=steps), QUICK, CHECKPOINT)
    clock = time.process_time if args.cpu_time else time.perf_counter
    run(plan, steps, args.only, clock, args.cache, args.file)


if __name__ == "__main__":
    main()
