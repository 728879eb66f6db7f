"""Measure the cost of the engine's techniques by ablation: grammars.

`python benchmarks/run.py techniques --help`. One engine serves the same jobs with the technique and
without, in turn. The table goes to standard output, the numbers to `results/techniques.json`.
docs/techniques.md describes the techniques.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.engine.checkpoint import CHECKPOINT, add_checkpoint
from benchmarks.engine.replay import Job, Replay, blocks_for, decode_rate
from benchmarks.serving.bench import QUICK, Bench, Plan
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, median_interval, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER
from motet_llm.engine.engine import Engine
from motet_llm.grammar.grammar import Grammar
from motet_llm.grammar.token_spelling import Spelling
from motet_shared import messages

RESULTS = RESULTS_FOLDER / "techniques.json"
PLAN = Plan(prompt=16, output=64)  # short prompts: what is compared is decoding
LEAST_GAIN = 0.95  # of the speed of free decoding, at least
MANY = 1_000_000

_TEXT = {"type": "string"}
_PERSON = {
    "type": "object",
    "properties": {
        "name": _TEXT,
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": _TEXT},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
# Replies that do not end before they are cut, so that both sides write as many tokens.
GRAMMARS = {
    "json_schema": json.dumps({"type": "array", "items": _PERSON, "minItems": MANY}),
    "json_schema, bounded strings": json.dumps(
        {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-zA-Z ]{1,40}$"},
            "minItems": MANY,
        }
    ),
    "regex": r"([A-Z][a-z]+ [0-9]{1,5}, )+",
}


@dataclass(frozen=True)
class GrammarCost:
    """Hold the throughput of streams with a grammar over the same streams without.

    mask_ms: per step, for all streams together, computed beside the model. compile_ms: the first
    compilation; later ones are cached.
    """

    grammar: str
    gains: list[float]
    mask_ms: float  # per step, for all streams together
    step_ms: float
    compile_ms: float  # of the first compilation; later ones are cached

    def cells(self) -> list[str]:
        low, high = median_interval(self.gains)
        gain = f"{statistics.median(self.gains):.3f} ({low:.3f}–{high:.3f})"
        return [
            f"grammar: {self.grammar}",
            gain,
            f"{self.mask_ms:.2f} of {self.step_ms:.1f}",
            f"{self.compile_ms:.1f}",
        ]

    def target(self, streams: int) -> Target:
        median = statistics.median(self.gains)
        return Target(
            f"{self.grammar}: held / free at c={streams}", median, LEAST_GAIN, "", most=False
        )


def measure(
    name: str, bench: Bench, engine: Engine, spelling: Spelling, *, streams: int, pairs: int
) -> GrammarCost:
    requested = messages.Grammar(
        kind="regex" if name == "regex" else "json_schema", text=GRAMMARS[name]
    )
    began = time.perf_counter()
    grammar = Grammar(requested, spelling)
    compile_ms = 1e3 * (time.perf_counter() - began)
    gains = []
    mask_seconds, masked_steps, held_seconds = 0.0, 0.0, 0.0
    for pair in range(pairs):
        prompts = [bench.tokens(bench.plan.prompt) for _ in range(streams)]
        rates = [0.0, 0.0]
        for constrained in (False, True) if pair % 2 else (True, False):
            before = engine.stats()
            jobs = [
                Job(
                    0.0,
                    prompt,
                    bench.plan.output,
                    grammar_state=grammar.start() if constrained else None,
                )
                for prompt in prompts
            ]
            served = Replay(engine, jobs).run()
            rates[constrained] = decode_rate(served)
            after = engine.stats()
            mask_seconds += after["mask_seconds"] - before["mask_seconds"]
            masked_steps += after["masked_steps"] - before["masked_steps"]
            held_seconds += max(s.times[-1] for s in served) if constrained else 0.0
        gains.append(rates[True] / rates[False])
    per_step = 1e3 / max(masked_steps, 1)
    return GrammarCost(name, gains, mask_seconds * per_step, held_seconds * per_step, compile_ms)


def run(
    plan: Plan, streams: int, pairs: int, wanted: str, cache: Path, output: Path
) -> list[GrammarCost]:
    """Measure, print the table, and write the JSON file."""
    before = conditions()
    torch.set_num_threads(plan.threads or torch.get_num_threads())
    bench = Bench(plan, cache)
    blocks = blocks_for(streams, plan.prompt + plan.output)
    engine = bench.engine(max_running=max(streams, 2), num_blocks=blocks, prefix_cache=False)
    spelling = Spelling.load(str(bench.folder), bench.vocab, engine.runner.eos_ids)
    findings = []
    for name in GRAMMARS:
        if wanted in name:
            findings.append(measure(name, bench, engine, spelling, streams=streams, pairs=pairs))
            print(f"  {' · '.join(findings[-1].cells())}", flush=True)
    engine.close()
    targets = [finding.target(streams) for finding in findings]
    print(f"\n{load_line(before)}")
    print(
        f"Random weights of the shape {plan.shape!r}, {streams} streams; {pairs} pairs, median and 95 % interval.\n"
    )
    print(
        table(
            ["technique", "gain", "mask ms of a step", "compile ms"],
            [finding.cells() for finding in findings],
        )
    )
    print()
    print(targets_table(targets))
    write(output, before, plan, findings, targets)
    return findings


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(
        "What the engine's techniques cost and gain.",
        "a tiny model and one pair",
        RESULTS,
        prog="techniques",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="grammars whose name contains TEXT (default: all)",
    )
    parser.add_argument(
        "--pairs", type=int, default=8, help="interleaved pairs of runs (default: 8)"
    )
    parser.add_argument("--streams", type=int, default=32, help="concurrent streams (default: 32)")
    add_checkpoint(parser, "middle")
    args = parser.parse_args(argv)
    plan = planned(args, PLAN, QUICK, CHECKPOINT)
    streams, pairs = (4, 1) if args.quick else (args.streams, args.pairs)
    run(plan, streams, pairs, args.only, args.cache, args.file)


if __name__ == "__main__":
    main()
