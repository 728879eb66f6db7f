"""Compare our vision encoders with transformers', and our step batches with diffusers'.

`python benchmarks/run.py images --help`. The tables go to standard output, the numbers to
`results/images.json`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.engine.llm import transformers_dtype
from benchmarks.images.diffusion import (
    DiffusionFindings,
    DiffusionPlan,
    Sizes,
    diffusion_report,
    diffusion_targets,
    run_diffusion,
)
from benchmarks.images.encoder import (
    EncoderFindings,
    EncoderPlan,
    encoder_report,
    encoder_targets,
    run_encoder,
)
from benchmarks.support.cache import cache_folder
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, targets_table
from benchmarks.support.paths import RESULTS_FOLDER

RESULTS = RESULTS_FOLDER / "images.json"
EXPERIMENTS = ("encoder", "diffusion")


@dataclass(frozen=True, kw_only=True)
class Plan:
    threads: int = 0
    encoder: EncoderPlan = field(default_factory=EncoderPlan)
    diffusion: DiffusionPlan = field(default_factory=DiffusionPlan)


QUICK = Plan(
    encoder=EncoderPlan(
        shapes=("siglip-least", "qwen2.5-vl-least"), sizes=((64, 56), (84, 56)), rounds=2
    ),
    diffusion=DiffusionPlan(
        shape="unet-least",
        sizes=(Sizes(side=8, inflight=(1, 2), pairs=2),),
        steps=5,
        rounds=2,
        least=2,
    ),
)


@dataclass
class Findings:
    encoder: EncoderFindings | None = None
    diffusion: DiffusionFindings | None = None
    targets: list[Target] = field(default_factory=list)


def measure(plan: Plan, names: Sequence[str], cache: Path) -> tuple[Findings, list[str]]:
    """Measure the named experiments; return the findings and the text of each part."""
    found, parts = Findings(), []
    if "encoder" in names:
        found.encoder = run_encoder(plan.encoder, cache, plan.threads, transformers_dtype("auto"))
        found.targets += encoder_targets(found.encoder)
        parts.append(f"## Images in\n\n{encoder_report(found.encoder)}")
    if "diffusion" in names:
        found.diffusion = run_diffusion(plan.diffusion, cache, plan.threads)
        found.targets += diffusion_targets(found.diffusion)
        parts.append(f"## Images out\n\n{diffusion_report(found.diffusion, plan.diffusion)}")
    return found, parts


def run(plan: Plan, names: Sequence[str], cache: Path, output: Path) -> Findings:
    """Measure, print the tables, and write the JSON file."""
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as `motet up` sets it
    before = conditions()
    plan = replace(plan, threads=plan.threads or len(os.sched_getaffinity(0)))
    cache.mkdir(parents=True, exist_ok=True)
    found, parts = measure(plan, names, cache)
    print(f"{load_line(before)}\n\n{plan.threads} threads.\n")
    print("\n\n".join([*parts, targets_table(found.targets)]), flush=True)
    write(output, before, plan, found, found.targets)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="images", description="Vision towers, and pictures drawn by step."
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny models and few pictures; a smoke test"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=EXPERIMENTS,
        default=EXPERIMENTS,
        help="those to run (default: all)",
    )
    parser.add_argument("--threads", type=int, help="threads of every engine (default: all cores)")
    parser.add_argument(
        "--rounds", type=int, help="runs of the encoders, whose medians are reported (default: 6)"
    )
    parser.add_argument(
        "--shapes", nargs="+", metavar="NAME", help="encoders to measure (default: all)"
    )
    parser.add_argument(
        "--sides",
        nargs="+",
        type=int,
        metavar="CELLS",
        help="sides of the latents (default: 16 32)",
    )
    parser.add_argument(
        "--pairs",
        type=int,
        help="pairs of single pictures, ours and diffusers' (default: 24 and 20)",
    )
    parser.add_argument(
        "--cache", type=Path, help="folder for checkpoints, 1 GB (bench in MOTET_CACHE)"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON file of the results")
    args = parser.parse_args(argv)
    run(_plan(args), args.only, args.cache or cache_folder(), args.output)


def _plan(args: argparse.Namespace) -> Plan:
    plan = QUICK if args.quick else Plan()
    encoder: dict[str, Any] = {} if args.rounds is None else {"rounds": args.rounds}
    encoder |= {"shapes": tuple(args.shapes)} if args.shapes else {}
    sizes = [size for size in plan.diffusion.sizes if not args.sides or size.side in args.sides]
    if args.pairs is not None:
        sizes = [replace(size, pairs=args.pairs) for size in sizes]
    return Plan(
        threads=args.threads or 0,
        encoder=replace(plan.encoder, **encoder),
        diffusion=replace(plan.diffusion, sizes=tuple(sizes)),
    )


if __name__ == "__main__":
    main()
