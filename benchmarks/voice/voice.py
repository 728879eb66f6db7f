"""Measure speech: recognition beside its peers, synthesis, and voice-to-voice latency.

`python benchmarks/run.py voice --help`. The tables go to standard output, the numbers to
`results/voice.json`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.engine.llm import transformers_dtype
from benchmarks.support.cache import cache_folder
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, targets_table
from benchmarks.support.paths import RESULTS_FOLDER
from benchmarks.voice.asr import AsrFindings, AsrPlan, asr_report, asr_targets, run_asr
from benchmarks.voice.tts import TtsFindings, TtsPlan, run_tts, tts_report, tts_targets
from benchmarks.voice.turns import TurnsFindings, TurnsPlan, run_turns, turns_report, turns_targets

RESULTS = RESULTS_FOLDER / "voice.json"
EXPERIMENTS = ("asr", "tts", "turns")


@dataclass(frozen=True, kw_only=True)
class Plan:
    threads: int = 0
    asr: AsrPlan = field(default_factory=AsrPlan)
    tts: TtsPlan = field(default_factory=TtsPlan)
    turns: TurnsPlan = field(default_factory=TurnsPlan)


QUICK = Plan(
    asr=AsrPlan(
        shape="whisper-least", clips=((1.0, 4), (4.0, 8)), batches=(1, 2), repeats=1, rounds=1
    ),
    tts=TtsPlan(
        streams=(1, 2), frames=20, repeats=1, rounds=1, vits="the least size", vits_repeats=1
    ),
    turns=TurnsPlan(turns=2, interruptions=1),
)


@dataclass
class Findings:
    asr: AsrFindings | None = None
    tts: TtsFindings | None = None
    turns: TurnsFindings | None = None
    targets: list[Target] = field(default_factory=list)


def measure(plan: Plan, names: Sequence[str], cache: Path) -> tuple[Findings, list[str]]:
    """Measure the named experiments; return the findings and the text of each part."""
    found, parts = Findings(), []
    if "asr" in names:
        found.asr = run_asr(plan.asr, cache, plan.threads, transformers_dtype("auto"))
        found.targets += asr_targets(found.asr, plan.asr)
        parts.append(f"## Recognition\n\n{plan.asr.shape}\n\n{asr_report(found.asr, plan.asr)}")
    if "tts" in names:
        found.tts = run_tts(plan.tts, cache, plan.threads)
        found.targets += tts_targets(found.tts)
        parts.append(f"## Speech\n\n{tts_report(found.tts)}")
    if "turns" in names:
        found.turns = run_turns(plan.turns)
        found.targets += turns_targets(found.turns)
        parts.append(f"## Voice to voice\n\n{turns_report(found.turns, plan.turns)}")
    return found, parts


def run(plan: Plan, names: Sequence[str], cache: Path, output: Path) -> Findings:
    """Measure, print the tables, and write the JSON file."""
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
        prog="voice", description="Recognition, speech, and spoken turns."
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny models and short runs; a smoke test"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=EXPERIMENTS,
        default=EXPERIMENTS,
        help="those to run (default: all)",
    )
    parser.add_argument(
        "--rounds", type=int, help="runs of every engine, whose medians are reported (default: 3)"
    )
    parser.add_argument("--threads", type=int, help="threads of every engine (default: all cores)")
    parser.add_argument(
        "--engines",
        nargs="+",
        metavar="NAME",
        help='prefixes of recognizer names, such as "motet int8" (default: all)',
    )
    parser.add_argument("--turns", type=int, help="spoken turns (default: 50)")
    parser.add_argument(
        "--asr", metavar="FOLDER", help="recognizer of the spoken turns (default: pocket-asr)"
    )
    parser.add_argument(
        "--tts", metavar="FOLDER", help="speech model of the spoken turns (default: pocket-tts)"
    )
    parser.add_argument(
        "--cache", type=Path, help="folder for checkpoints, 0.5 GB (bench in MOTET_CACHE)"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON file of the results")
    args = parser.parse_args(argv)
    run(_plan(args), args.only, args.cache or cache_folder(), args.output)


def _plan(args: argparse.Namespace) -> Plan:
    plan = QUICK if args.quick else Plan()
    rounds: dict[str, Any] = {} if args.rounds is None else {"rounds": args.rounds}
    engines: dict[str, Any] = {} if args.engines is None else {"engines": tuple(args.engines)}
    turns = {
        name: value
        for name in ("turns", "asr", "tts")
        if (value := getattr(args, name)) is not None
    }
    return Plan(
        threads=args.threads or 0,
        asr=replace(plan.asr, **rounds, **engines),
        tts=replace(plan.tts, **rounds),
        turns=replace(plan.turns, **turns),
    )


if __name__ == "__main__":
    main()
