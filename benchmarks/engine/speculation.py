"""Measure the gain and cost of speculation against the same streams without, step by step in turn.

`python benchmarks/run.py speculation --help`. Weights are random, so drafts are given the answers and
are right with a chosen probability (`known_drafts.py`); the cost of drafting is real. The table
goes to standard output, the numbers to `results/speculation.json`. docs/techniques.md describes
speculation.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.checkpoint import SHAPES, add_checkpoint, random_checkpoint
from benchmarks.engine.known_drafts import KnownDraftModel, KnownNgramDrafts
from benchmarks.engine.replay import (
    IN_TURN,
    Job,
    Replay,
    blocks_for,
    decode_rate,
    reserve_half,
    run_in_turn,
)
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, median_interval, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.engine.model_runner import ModelRunner
from motet_llm.speculation.controller import SpeculationController
from motet_llm.speculation.speculator import Speculation

RESULTS = RESULTS_FOLDER / "speculation.json"
FLOOR = 0.97  # of the speed without drafts, wherever they do not pay
NGRAM, DRAFT = 1.8, 1.4  # the gains that are promised for one stream


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define how much is measured; lengths in tokens.

    every: in a repeated text, one of this many tokens is changed. right: acceptance probability of
    the draft model's tokens.
    """

    shape: str = "qwen3-0.6b"
    draft: str = "qwen3-0.06b"
    kinds: tuple[str, ...] = ()
    streams: tuple[int, ...] = (1, 4, 16, 32)
    temperatures: tuple[float, ...] = (0.0, 0.8)
    pairs: int = 8
    prompt: int = 128
    output: int = 128
    tokens: int = 5
    every: int = 16
    right: float = 0.7
    threads: int = 0


QUICK = Plan(
    shape="tiny",
    draft="tiny draft",
    streams=(1, 2),
    temperatures=(0.0, 0.8),
    pairs=1,
    prompt=12,
    output=24,
    threads=1,
)


@dataclass(frozen=True)
class Kind:
    """Define a kind of drafts.

    speculate: the engine's setting. drafts: creates drafts that know the answers. goal: least gain
    for one greedy stream; 0: none.
    """

    name: str
    speculate: str
    drafts: Callable[[EngineConfig, ModelRunner], Any]
    goal: float = 0.0  # for one stream, greedy


@dataclass(frozen=True)
class Finding:
    """Hold one kind at one temperature and number of streams.

    gains: throughput with drafts over without, by pair. off: share of the decode steps without
    drafts.
    """

    kind: str
    temperature: float
    streams: int
    gains: list[float]
    drafted: int
    accepted: int
    off: float  # share of the decode steps without drafts
    goal: float

    def cells(self) -> list[str]:
        low, high = median_interval(self.gains)
        gain = f"{statistics.median(self.gains):.3f} ({low:.3f}–{high:.3f})"
        share = f"{self.accepted / self.drafted:.2f}" if self.drafted else "–"
        return [
            self.kind,
            f"{self.temperature:g}",
            str(self.streams),
            gain,
            share,
            f"{self.off:.0%}",
        ]

    def targets(self) -> Iterator[Target]:
        name, median = (
            f"{self.kind}, temperature {self.temperature:g}, c={self.streams}",
            statistics.median(self.gains),
        )
        yield Target(name, median, FLOOR, "", most=False)
        if self.goal and self.streams == 1 and self.temperature == 0:
            yield Target(name, median, self.goal, "", most=False)


def kinds(plan: Plan, cache: Path) -> list[Kind]:
    draft = str(random_checkpoint(plan.draft, cache))
    vocab = SHAPES[plan.shape]["vocab_size"]
    found = [
        Kind(
            "n-gram, repeated text", "ngram", lambda *_: KnownNgramDrafts(vocab, plan.every), NGRAM
        ),
        Kind(
            "n-gram, always wrong",
            "ngram",
            lambda *_: KnownNgramDrafts(vocab, plan.every, wrong=True),
        ),
        Kind(
            f"draft model, {plan.right:g} right",
            draft,
            lambda c, r: KnownDraftModel(c, r, plan.right),
            DRAFT,
        ),
        Kind("draft model, always wrong", draft, lambda c, r: KnownDraftModel(c, r, 0.0)),
    ]
    return [
        kind
        for kind in found
        if not plan.kinds or any(wanted in kind.name for wanted in plan.kinds)
    ]


class Bench:
    """Hold one model with two engines, with and without drafts: copies of a model differ in speed."""

    def __init__(self, plan: Plan, cache: Path):
        self.plan = plan
        self._random = random.Random(0)
        self._folder = random_checkpoint(plan.shape, cache)
        self.plain = Engine(self._config())
        reserve_half(self.plain, 0)

    def _config(self, speculate: str = "off") -> EngineConfig:
        plan, most = self.plan, max(self.plan.streams)
        return EngineConfig(
            model=str(self._folder),
            threads=plan.threads,
            num_blocks=2 * blocks_for(most, plan.prompt + plan.output + plan.tokens),
            max_running=max(most, 2),
            decode_slowdown=0,  # prompts first, so that all streams decode together
            prefix_cache=False,
            speculate=speculate,
            draft_tokens=plan.tokens,
            **IN_TURN,
        )

    def measure(self, kind: Kind) -> Iterator[Finding]:
        config = self._config(kind.speculate)
        drafts = kind.drafts(config, self.plain.runner)
        for temperature in self.plan.temperatures:
            for streams in self.plan.streams:
                speculation = Speculation(drafts, SpeculationController(config.draft_tokens))
                engine = Engine(config, self.plain.runner, speculation=speculation)
                reserve_half(engine, 1)
                yield self._compare(kind, engine, drafts, temperature, streams)
                engine.close()

    def _compare(
        self, kind: Kind, engine: Engine, drafts: Any, temperature: float, streams: int
    ) -> Finding:
        gains = []
        for pair in range(self.plan.pairs + 1):
            jobs = [self._job(temperature) for _ in range(streams)]
            drafts.answers = {
                str(at): served.ids for at, served in enumerate(Replay(self.plain, jobs).run())
            }
            plain, drafted_run = run_in_turn(Replay(self.plain, jobs), Replay(engine, jobs))
            if [served.ids for served in plain] != [served.ids for served in drafted_run]:
                raise RuntimeError(f"{kind.name}: drafts have changed the tokens")
            if pair:  # in the first pair the controller measures step times
                gains.append(decode_rate(drafted_run) / decode_rate(plain))
        stats = engine.stats()
        drafted, accepted = int(stats["drafted_tokens"]), int(stats["accepted_tokens"])
        off = stats["speculation_off_steps"] / max(
            stats["speculation_off_steps"] + stats["speculated_steps"], 1
        )
        return Finding(kind.name, temperature, streams, gains, drafted, accepted, off, kind.goal)

    def _job(self, temperature: float) -> Job:
        vocab = SHAPES[self.plan.shape]["vocab_size"]
        prompt = [self._random.randrange(vocab) for _ in range(self.plan.prompt)]
        return Job(0.0, prompt, self.plan.output, temperature=temperature)


def run(plan: Plan, cache: Path, output: Path) -> list[Finding]:
    """Measure, print the table, and write the JSON file."""
    before = conditions()
    torch.set_num_threads(plan.threads or torch.get_num_threads())
    bench = Bench(plan, cache)
    findings = []
    for kind in kinds(plan, cache):
        for finding in bench.measure(kind):
            findings.append(finding)
            print(f"  {' · '.join(finding.cells())}", flush=True)
    bench.plain.close()
    targets = [target for finding in findings for target in finding.targets()]
    print(f"\n{load_line(before)}")
    print(
        f"Random weights of the shape {plan.shape!r}; {plan.pairs} pairs, median and 95 % interval.\n"
    )
    header = ["drafts", "temperature", "streams", "gain", "right", "off"]
    print(table(header, [finding.cells() for finding in findings]))
    print()
    print(targets_table(targets))
    write(output, before, plan, findings, targets)
    return findings


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, "a tiny model and one pair", RESULTS, prog="speculation")
    parser.add_argument(
        "--kinds", nargs="+", metavar="TEXT", help="kinds whose name contains TEXT (default: all)"
    )
    parser.add_argument(
        "--streams", nargs="+", type=int, help="numbers of concurrent streams (default: 1 4 16 32)"
    )
    parser.add_argument(
        "--temperatures", nargs="+", type=float, help="sampling temperatures (default: 0 0.8)"
    )
    parser.add_argument("--pairs", type=int, help="interleaved pairs of runs (default: 8)")
    parser.add_argument(
        "--draft", choices=sorted(SHAPES), help="shape of the draft model (default: qwen3-0.06b)"
    )
    add_checkpoint(parser, "qwen3-0.6b")
    args: argparse.Namespace = parser.parse_args(argv)
    run(planned(args, Plan(), QUICK), args.cache, args.file)


if __name__ == "__main__":
    main()
